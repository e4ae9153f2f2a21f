"""torch.distributed.checkpoint's files, read so that nothing in them is run.

They hold pickles, and a pickle is a program: `.metadata`, which says what lies where, is one, and so is each entry of
the data files. The library runs the first, and those of entries that are no tensors, whatever they call for; here they
may call for nothing but what a checkpoint is made of. Checksums are no help in this: they show what a disk has done to
the files, while whoever writes other files writes other checksums.
"""

from __future__ import annotations

import io
import math
import pickle
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata

# private: torch.distributed.checkpoint.filesystem._StorageInfo
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,  # private: torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tuningfork.files import check_plain, read_plain
from tuningfork.wording import first_line, of_pickle

METADATA = ".metadata"

_LARGEST_ENTRY = 1 << 14  # bytes of `.metadata` for a tensor: some hundred, its name three times among them
_LARGEST_PIECE = 1 << 10  # and for each further piece of it: its place in the tensor twice, and in a file
_INDEX = {"fqn", "offset", "index"}
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}
_FILLED = (  # objects of these are made first and get their fields then
    *(Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, BytesStorageMetadata),
    *(ChunkStorageMetadata, TensorProperties, _StorageInfo),
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_FILLED, _MEM_FORMAT_ENCODING, torch.Size)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): lambda name: _LAYOUTS[name],  # private: torch.serialization._get_layout
    # Where the checkpoint was written: it may have been moved since, and nobody asks.
    # private: pathlib._local
    **{(module, "PosixPath"): lambda *parts: None for module in ("pathlib", "pathlib._local")},
}


class Foreign(ValueError):
    """A checkpoint's file calls for something that none is made of, or says other things than where its parts lie."""


class PlainReader(FileSystemReader):
    """Reads a checkpoint whose files call for nothing but what one is made of, and which lie in its folder.

    Args:
        path: of the checkpoint.
        tensors: how many the run has, about: what says where so many lie is not larger than that takes.
        ranks: that wrote it, and so the most pieces that a tensor lies in.

    Raises:
        Foreign: they call for something else, or hold something else than whole tensors.
        RunFolderError: one of them is a link or a pipe, or `.metadata` is far too large.
        OSError: `.metadata` cannot be read.
    """

    def __init__(self, path: Path, tensors: int, ranks: int = 1) -> None:
        super().__init__(path)
        of_a_tensor = _LARGEST_ENTRY + (ranks - 1) * _LARGEST_PIECE
        self._metadata = _metadata(path / METADATA, (tensors + 1) * of_a_tensor)

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)  # which loads tensors as such, and hands the rest to the planner
        except pickle.UnpicklingError as error:
            raise Foreign(f"its data: {of_pickle(error)}") from error


class PlainPlanner(DefaultLoadPlanner):
    """Loads a state whose every entry the checkpoint has, of whose sections it has nothing else, and all as tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        sections = tuple(f"{name}." for name in state_dict)
        theirs = {name for name in metadata.state_dict_metadata if f"{name}.".startswith(sections)}
        for one, what in ((theirs - self.state_dict.keys(), "more"), (self.state_dict.keys() - theirs, "less")):
            if one:
                raise ValueError(f"it holds {what} than this run has: {min(one)}")

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise Foreign(f"{read_item.dest_index.fqn} is no tensor")


def _metadata(path: Path, largest: int) -> Metadata:
    content = read_plain(path, largest)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise Foreign(f"{path.name}: {of_pickle(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # what is no pickle fails in any way
        raise Foreign(f"{path.name} is broken: {first_line(error)}") from error
    stored = metadata.storage_data if isinstance(metadata, Metadata) else None
    if not isinstance(stored, dict) or not all(map(_lies_beside, stored.values())):
        raise Foreign(f"{path.name} does not say what lies where in the files beside it")
    entries = metadata.state_dict_metadata
    wrong = [name for name in entries if not _is_whole(entries[name])] if isinstance(entries, dict) else [METADATA]
    if wrong:
        raise Foreign(f"{path.name}: {wrong[0]} is not stored as one whole tensor")
    for name in {place.relative_path for place in stored.values()}:
        check_plain(path.with_name(name))
    metadata.storage_meta = StorageMeta()
    return metadata


def _is_whole(entry: object) -> bool:
    """Whether this is a tensor of which every number lies in one piece: where one lay in none, what was in the model
    before would stay there. Processes that share a tensor cut it along its dimensions, so its pieces are a grid."""
    if not isinstance(entry, TensorStorageMetadata) or type(entry.size) is not torch.Size:
        return False
    if type(entry.chunks) is not list or not all(_is_piece(chunk, len(entry.size)) for chunk in entry.chunks):
        return False
    if 0 in entry.size:
        return True
    places = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in entry.chunks]
    places = [place for place in places if all(length for _, length in place)]  # a process may have nothing of it
    cuts = [sorted(set(along)) for along in zip(*places, strict=True)]
    if len(places) != len(set(places)) or len(places) != math.prod(map(len, cuts)):
        return False
    ends = [[*accumulate((length for _, length in parts), initial=0)] for parts in cuts]
    begins = [[*(begin for begin, _ in parts), length] for parts, length in zip(cuts, entry.size, strict=False)]
    return bool(places) and begins == ends


def _is_piece(chunk: object, dimensions: int) -> bool:
    """Whether this is a place in a tensor of so many dimensions."""
    if not isinstance(chunk, ChunkStorageMetadata):
        return False
    corners = (chunk.offsets, chunk.sizes)
    return all(type(one) is torch.Size and len(one) == dimensions and min(one, default=0) >= 0 for one in corners)


def _lies_beside(place: object) -> bool:
    """Whether this is a place in a data file of the checkpoint's own folder, stored as it is."""
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    if type(place.offset) is not int or type(place.length) is not int or min(place.offset, place.length) < 0:
        return False
    name = place.relative_path
    return Path(name).name == name and name.endswith(DEFAULT_SUFFIX) and not place.transform_descriptors


_InPython: Any = pickle._Unpickler  # private: pickle._Unpickler
_STEPS = {  # of a pickle, that a checkpoint's take: those of the protocols from 2 on for plain values and objects
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ),
    *(pickle.REDUCE, pickle.BUILD, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET),
    *(pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1),
    *(pickle.BININT2, pickle.LONG1, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND),
    *(pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
}


class _MetadataUnpickler(_InPython):
    """The unpickler that is written in Python, so that its steps can be held.

    It sets fields of an object, which must not be those of a class, for they would stay set in the whole process. And
    it hashes: the keys of tables, and what an enumeration is asked for. Those are flat, for to hash tuples within
    tuples takes stack for each level, which can end the process, and time that can double with each.
    """

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return known

    def load_build(self) -> None:
        if type(self.stack[-2]) not in _FILLED:
            raise pickle.UnpicklingError(f"fields of {type(self.stack[-2]).__name__}")
        super().load_build()

    def load_newobj(self) -> None:
        if self.stack[-1] != () or self.stack[-2] not in _FILLED:
            raise ValueError("an object is not made as a checkpoint's are")
        super().load_newobj()

    def load_reduce(self) -> None:
        made, given = self.stack[-2:]
        if made is torch.Size and isinstance(given, tuple) and len(given) == 1:
            given = given[0]
        if made in _FILLED or not _is_flat(given):
            raise ValueError("an object is not made as a checkpoint's are")
        super().load_reduce()

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    dispatch = {step: _InPython.dispatch[step] for step in (name[0] for name in _STEPS)} | {
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.REDUCE[0]: load_reduce,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _check_key(key: object) -> None:
    """Raise ValueError for a key of a table that none of a checkpoint's has."""
    if type(key) is MetadataIndex:
        fields = vars(key)
        if fields.keys() == _INDEX and type(fields["offset"]) in (torch.Size, type(None)):
            key = (fields["fqn"], fields["index"])
    elif type(key) is str:
        return
    if not _is_flat(key):
        raise ValueError("a key of a table is none")


def _is_flat(values: object) -> bool:
    """Whether this is a tuple of texts and numbers."""
    return type(values) is tuple and all(type(value) in (str, int, bool, type(None)) for value in values)
