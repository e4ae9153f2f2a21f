"""The export of a model that is spread over processes: each weights file is written by one of them, tensor by tensor.

All bring each tensor together, some rows at a time, and only the one whose file it belongs to keeps them: no host ever
holds the model, nor more than one tensor of it.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.rows import pieces
from tuningfork.errors import SAVING, OutOfMemory, RunFolderError, is_of_memory
from tuningfork.files import CURE, whole_folder
from tuningfork.models.hf import digests, export
from tuningfork.models.hf.load import Loaded
from tuningfork.models.hf.released import Place
from tuningfork.models.hf.safetensors_reader import INDEX, stored_tensors
from tuningfork.models.hf.safetensors_writer import Forms, in_order, written
from tuningfork.wording import first_line

Result = TypeVar("Result")

FILE = 5_000_000_000
"""Bytes of a weights file, if no tensor is larger: small enough for each of many processes to have one to write."""


def save(loaded: Loaded, ranks: Ranks, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model as the new folder `path`, see `models.hf.export.save`; all ranks must come here.

    Where the library takes tensors apart for the disk, or puts them together, the first rank gathers all of them.

    Raises:
        RunFolderError: the disk refuses, on whichever rank. There is no folder then.
        OutOfMemory: a machine has no room for two tensors.
    """
    if ranks.size == 1:
        with whole_folder(path) as aside:
            export.save(loaded, aside, dtype)
    elif ranks.first:
        with whole_folder(path) as aside:
            _fill(loaded, _Turns(ranks, path), ranks.from_first(aside), dtype)
    else:
        _fill(loaded, _Turns(ranks, path), ranks.from_first(path), dtype)
    ranks.barrier()  # it has its name


class _Turns:
    """What ranks do side by side, each with its own disk and memory: where one fails, all are told, and all fail."""

    def __init__(self, ranks: Ranks, path: Path) -> None:
        self.ranks = ranks
        self._path = path
        self._failed: OutOfMemory | RunFolderError | None = None

    def attempt(self, do: Callable[..., Result], *args: Any) -> Result | None:
        """What `do` gives; None where it fails, or this rank has failed before."""
        if self._failed is not None:
            return None
        try:
            return do(*args)
        except (OSError, MemoryError, RuntimeError) as error:
            if is_of_memory(error):
                self._failed = OutOfMemory(f"exporting the model: {first_line(error)}", SAVING)
            elif isinstance(error, OSError):
                self._failed = RunFolderError(f"{self._path} cannot be written: {error.strerror or error}. {CURE}")
            else:
                raise
        return None

    def end(self) -> None:
        """Raise the same on all ranks where an attempt of one has failed."""
        for failed in self.ranks.all(self._failed):
            if failed is not None:
                raise failed


def _fill(loaded: Loaded, turns: _Turns, aside: Path, dtype: torch.dtype | None) -> None:
    """Write the files of a folder that the first rank has made; it checks in the end what the others have written."""
    ranks = turns.ranks
    places = ranks.from_first(export.places_on_disk(loaded) if ranks.first else None)  # the library saves at the first
    forms: Forms = {}
    if places is None:
        _write_at_first(loaded, turns, aside, dtype)
        sums: dict[str, str] = {}
    else:
        kinds, state = export.exported_dtypes(loaded, dtype), export.state_of(loaded)
        parts = {disk: _Part(state[at.name].detach(), kinds[at.name], at) for disk, at in places.items()}
        forms = {name: part.form for name, part in parts.items()}
        plan = split_torch_state_dict_into_shards(
            {n: p.without_numbers() for n, p in parts.items()}, max_shard_size=FILE
        )
        files = {file: {name: forms[name] for name in inside} for file, inside in plan.filename_to_tensors.items()}
        sums = _write_files(parts, files, turns, aside)
        if plan.is_sharded and ranks.first:
            sizes = {"total_parameters": loaded.model.num_parameters(), **plan.metadata}
            index = json.dumps({"metadata": sizes, "weight_map": plan.tensor_to_filename}, indent=2, sort_keys=True)
            turns.attempt((aside / INDEX).write_text, index + "\n")
    if ranks.first:
        turns.attempt(_finish, loaded, aside, dtype, sums, forms)
    turns.end()


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor, spread or whole, and in what they are exported."""

    tensor: Tensor
    dtype: torch.dtype
    place: Place

    @property
    def form(self) -> tuple[torch.Size, torch.dtype]:
        numbers = self.without_numbers()
        return numbers.shape, numbers.dtype

    def without_numbers(self) -> Tensor:
        return self.place.of(torch.empty(self.tensor.shape, dtype=self.dtype, device="meta"))

    def gathered(self, to: int, turns: _Turns) -> Tensor | None:
        """Its numbers on the host of one rank, None elsewhere; also there, where it has no room, which `turns` knows.
        All must ask together. Beyond them no host has more than a piece."""
        start, end = self.place.start, self.place.end
        here = turns.ranks.rank == to
        if not isinstance(self.tensor, DTensor):
            return turns.attempt(self.place.of(self.tensor).to, "cpu", self.dtype) if here else None
        numbers = turns.attempt(_room, self.form) if here else None
        for first, rows in pieces(self.tensor, turns.ranks, start, end):
            if numbers is not None:
                numbers[first - start : first - start + len(rows)] = rows
        return numbers


def _write_files(parts: Mapping[str, _Part], files: Mapping[str, Forms], turns: _Turns, aside: Path) -> dict[str, str]:
    """Deal out the files, write those of all ranks side by side, and find the checksums of all."""
    ranks = turns.ranks
    dealt = [{file: files[file] for file in [*files][rank :: ranks.size]} for rank in range(ranks.size)]
    names = [[name for forms in those.values() for name in in_order(forms)] for those in dealt]
    sums: dict[str, str] = {}
    with closing(_written(aside, dealt[ranks.rank], sums)) as writing:
        turns.attempt(next, writing)
        for turn in zip_longest(*names):  # a tensor of each rank that has one left
            own = None
            for rank, name in enumerate(turn):
                if name is not None:
                    found = parts[name].gathered(rank, turns)
                    own = found if rank == ranks.rank else own
            if own is not None:
                turns.attempt(writing.send, own)
            del own, found
            turns.end()
    return {file: digest for found in ranks.all(sums) for file, digest in found.items()}


def _written(aside: Path, files: Mapping[str, Forms], sums: dict[str, str]) -> Generator[None, Tensor, None]:
    """Write files, one after the other, of the tensors that are sent; `sums` gets their checksums."""
    for file, forms in files.items():
        sums[file] = yield from written(aside / file, forms)
    yield


def _write_at_first(loaded: Loaded, turns: _Turns, aside: Path, dtype: torch.dtype | None) -> None:
    """Gather all tensors at the first rank, which has the library write them."""
    kinds, first = export.exported_dtypes(loaded, dtype), turns.ranks.first
    gathered: dict[int, Tensor | None] = {}
    state = export.state_of(loaded)
    for name, tensor in state.items():
        if id(tensor) not in gathered:
            whole = _whole(tensor.detach())
            gathered[id(tensor)] = turns.attempt(whole.to, "cpu", kinds[name]) if first else None
            del whole
    turns.end()
    if first:
        tensors = {name: there for name, tensor in state.items() if (there := gathered[id(tensor)]) is not None}
        turns.attempt(export.write_weights, loaded, aside, tensors, dtype)


def _room(form: tuple[torch.Size, torch.dtype]) -> Tensor:
    return torch.empty(form[0], dtype=form[1])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _finish(loaded: Loaded, aside: Path, dtype: torch.dtype | None, sums: Mapping[str, str], forms: Forms) -> None:
    """Write what is no weight, and look whether the weights of all ranks are there. Raises OSError."""
    for file in sums:
        if not (aside / file).is_file():
            raise OSError(
                errno.ENOENT, f"{file}, which another process wrote, is not there: it must be a folder of all machines"
            )
    export.write_beside(loaded, aside, dtype)
    digests.write(aside, sums)
    found = stored_tensors(aside)
    if forms and (found is None or {n: (there.shape, there.dtype) for n, there in found.tensors.items()} != forms):
        raise OSError(errno.EIO, "the weights files are not as they were written")
