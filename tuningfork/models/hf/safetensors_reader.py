"""The weight files of a model folder: which tensor lies where, and reading them at the speed of the disk."""

from __future__ import annotations

import json
import os
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import safetensors
import torch
from torch import Tensor

from tuningfork.json_files import LONGEST_NAME, read_object
from tuningfork.wording import first_line, of_pickle, shortened

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
FILES = (ONE_FILE, INDEX, PICKLE, PICKLE_INDEX)

_THREADS = min(8, os.cpu_count() or 1)  # eight keep a fast disk, or the copies out of the page cache, busy
_PIECE = 16 << 20  # bytes read at once, a multiple of every element's size
_AROUND = 1 << 30  # bytes of memory that reading a small file may take
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""What the format calls each dtype."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies on the disk, and as what."""

    path: Path
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: torch.Size
    wanted: slice | None = None  # of each row, these columns alone

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def rows(self, start: int, count: int) -> Stored:
        """Some of its rows, which lie together."""
        shape = torch.Size((count, *self.shape[1:]))
        width = shape[1:].numel() * self.dtype.itemsize
        return replace(self, offset=self.offset + start * width, shape=shape)

    def columns(self, start: int, count: int) -> Stored:
        """Some columns of a matrix; its rows are yet read whole."""
        return replace(self, wanted=slice(start, start + count))

    @property
    def parts(self) -> tuple[Stored, ...]:
        return (self,)


@dataclass(frozen=True)
class Stack:
    """A tensor that lies on the disk as several, to be put one above the other."""

    parts: tuple[Stored, ...]

    @classmethod
    def of(cls, tensors: Iterable[Lying]) -> Stack:
        """Raises ValueError where they do not fit together."""
        parts = tuple(part for tensor in tensors for part in tensor.parts)
        if len({part.shape[1:] for part in parts}) > 1 or any(not part.shape for part in parts):
            shapes = ", ".join(f"{tuple(part.shape)} in {part.path.name}" for part in parts)
            raise ValueError(f"tensors that are parts of one have shapes that do not fit: {shapes}; get weights anew")
        return cls(parts)

    @property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (part.dtype for part in self.parts))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]))

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def rows(self, start: int, count: int) -> Stack:
        """Some of its rows, which lie together in it."""
        found, end = [], start + count
        for part in self.parts:
            first, last = max(start, 0), min(end, part.shape[0])
            if first < last:
                found.append(part.rows(first, last - first))
            start, end = start - part.shape[0], end - part.shape[0]
        return Stack(tuple(found) or (self.parts[0].rows(0, 0),))

    def columns(self, start: int, count: int) -> Stack:
        """Some columns of a matrix, see Stored."""
        return Stack(tuple(part.columns(start, count) for part in self.parts))


Lying = Stored | Stack
"""A tensor on the disk, however it lies there."""


@dataclass(frozen=True)
class Found:
    """The tensors of a folder's weights by name, each from the one file that it belongs to."""

    tensors: dict[str, Stored]
    unnamed: dict[str, Path] = field(default_factory=dict)  # lie in a file of the index, which does not name them
    notes: tuple[str, ...] = ()  # what was passed over, in words


def stored_tensors(folder: Path) -> Found | None:
    """What lies in a folder's safetensors files; None where it has none.

    One file goes before an index, as in transformers. Of an index's files each gives the tensors that the index takes
    from it and no others: readers that take whatever lies there train on a stale copy in a later file.

    Raises:
        ValueError: an index that is broken or does not belong to its files, or an element type that PyTorch lacks.
        OSError, safetensors.SafetensorError: a file is missing or broken.
    """
    if (folder / ONE_FILE).exists():
        both = f"{ONE_FILE} is read, as transformers does; {INDEX} and the files that it names are passed over"
        return Found(_tensors_in(folder / ONE_FILE), notes=(both,) if (folder / INDEX).exists() else ())
    if not (folder / INDEX).exists():
        return None
    file_of = weight_map(folder / INDEX)
    found, unnamed, stale = {}, {}, []
    for file in sorted(set(file_of.values())):
        for name, there in _tensors_in(folder / file).items():
            if file_of.get(name) == file:
                found[name] = there
            elif name in file_of:
                stale.append(f"{name} in {file}")
            else:
                unnamed[name] = there.path
    check_complete(found, file_of, INDEX)
    notes = []
    if stale:
        notes.append(f"passed over, since {INDEX} takes it from another file: {_first(stale)}")
    if unnamed:
        listed = [f"{name} in {path.name}" for name, path in unnamed.items()]
        notes.append(f"passed over, since {INDEX} does not name it: {_first(listed)}")
    return Found(found, unnamed, tuple(notes))


def bytes_in(folder: Path) -> int:
    """Bytes of a folder's weight files, in whichever format."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files if file.is_file())


def pickled_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's older weight files, on the CPU, each from the file that their index names for it.

    Such files are pickles, which are programs: one that holds more than tensors and plain values is not loaded, nor one
    that says little and means much, as a tensor does that repeats one number without end.

    Raises what `torch.load` raises for a broken file, ValueError for a broken index or such a program, or OSError for a
    missing file.
    """
    if (folder / PICKLE).exists():
        return _plain(folder / PICKLE)
    file_of = weight_map(folder / PICKLE_INDEX)
    found: dict[str, Tensor] = {}
    for file in sorted(set(file_of.values())):
        content = _plain(folder / file)
        found |= {name: tensor for name, tensor in content.items() if file_of.get(name) == file}
    check_complete(found, file_of, PICKLE_INDEX)
    return found


def _plain(path: Path) -> dict[str, Tensor]:
    """The tensors of one such file. It takes no more memory than so many bytes can fill: a pickle may ask for any."""
    size = path.stat().st_size
    _check_stored_as_it_is(path, size)
    try:
        with _memory(2 * size + _AROUND):
            content = torch.load(path, "cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path.name}: {of_pickle(error)}. Get the model in safetensors files") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name}: holds no table of tensors. Get the model in safetensors files")
    said = 0
    for name, tensor in content.items():
        _check_name(name, path)
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_nested or not _on_cpu(tensor):
            raise ValueError(f"{path.name}: {name} is no plain tensor. Get the model in safetensors files")
        said += tensor.nbytes
        if tensor.nbytes > tensor.untyped_storage().nbytes() or said > 2 * size:  # tied weights lie there once
            raise ValueError(
                f"{path.name}: says that {name} is larger than what the file stores of it. Get that file anew"
            )
    return content


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"  # what has no memory at all is on another


def _check_stored_as_it_is(path: Path, size: int) -> None:
    """Raise ValueError where an archive holds more than its own bytes, which PyTorch writes as they are."""
    if not zipfile.is_zipfile(path):  # as PyTorch wrote until 1.5
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError(
            f"{path.name}: is packed, which PyTorch's own files are not. Get the model in safetensors files"
        )


@contextmanager
def _memory(more: int) -> Iterator[None]:
    """Refuse the process so many bytes more than it has, where the kernel is Linux. A MemoryError, or torch's own."""
    try:
        used = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = min(given for given in (used + more, soft, hard) if given != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _check_name(name: object, path: Path) -> None:
    """Raise ValueError for a tensor's name that is none: the library searches each for many patterns."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{path.name}: calls a tensor {shortened(repr(name), 40)}, which is no name of one. Get that file anew"
        )


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names. Raises ValueError where it does not say so, or a file is missing."""
    try:
        file_of = read_object(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise ValueError(f"{index.name} cannot be read: {first_line(error)}; get that file anew") from error
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise ValueError(f"{index.name} has no weight_map of tensor names to file names; get that file anew")
    for file in sorted(set(file_of.values())):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{index.name} names {file}, which lies outside of the folder; get that file anew")
        if not (index.parent / file).is_file():
            raise ValueError(f"{index.name} names {file}, which is not there; get that file")
    return file_of


def check_complete(found: Mapping[str, object], file_of: Mapping[str, str], index: str) -> None:
    """Raise ValueError where a file lacks a tensor that its index takes from it."""
    for name, file in file_of.items():
        if name not in found:
            raise ValueError(
                f"{index} takes {name} from {file}, which does not hold it; get files that belong together"
            )


def _tensors_in(path: Path) -> dict[str, Stored]:
    """What one safetensors file holds."""
    with safetensors.safe_open(path, framework="pt"):
        pass  # by opening it, the library checks that the header is sound and the file as long as it says
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        _check_name(name, path)
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} in {path.name} is stored as {entry['dtype']}, which is not known here")
        offset = 8 + length + entry["data_offsets"][0]
        found[name] = Stored(path, offset, _DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
    return found


def _first(things: list[str]) -> str:
    return things[0] + (f", and {len(things) - 1} more" if len(things) > 1 else "")


def read_weights(
    tensors: Iterable[tuple[Tensor, Lying]], progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Fill contiguous tensors, on any device, with what lies on the disk, or the columns wanted of it, cast to their
    dtype there.

    The files are read once and in order, by several threads; a piece that goes to a GPU is read into pinned memory, so
    that the host neither holds the model nor casts it.

    Args:
        progress: told the bytes read so far, and all that will be.

    Raises:
        OSError: the disk fails, or a file ends too early.
    """
    pieces = sorted(_pieces(tensors), key=lambda piece: (piece.path, piece.offset))
    total, done = sum(piece.bytes for piece in pieces), 0
    pinned = any(piece.target.is_cuda for piece in pieces)
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(_THREADS):
        buffers.put(torch.empty(_PIECE, dtype=torch.uint8, pin_memory=pinned))
    with ThreadPoolExecutor(_THREADS, "reading weights") as pool:
        for size in pool.map(lambda piece: piece.read(buffers), pieces):
            done += size
            progress(done, total)


@dataclass(frozen=True)
class _Piece:
    """A stretch of a file, and the elements of a tensor that it fills."""

    path: Path
    offset: int
    bytes: int
    dtype: torch.dtype
    target: Tensor
    wanted: slice | None = None  # of each row of the stretch, which has those of the target

    def read(self, buffers: SimpleQueue[Tensor]) -> int:
        """Fill the target by way of a free buffer; the bytes read."""
        device = self.target.device
        buffer = buffers.get()
        try:
            host = buffer[: self.bytes] if self.bytes <= len(buffer) else buffer.new_empty(self.bytes)  # for a long row
            with self.path.open("rb", buffering=0) as file:  # its own, so that the kernel reads ahead in each
                file.seek(self.offset)
                _fill(host.numpy().data, file, self.path)
            there = host.view(self.dtype).to(device, non_blocking=True)
            self.target.copy_(there if self.wanted is None else there.view(len(self.target), -1)[:, self.wanted])
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the other threads read meanwhile
        finally:
            buffers.put(buffer)
        return self.bytes


def _pieces(tensors: Iterable[tuple[Tensor, Lying]]) -> Iterator[_Piece]:
    for tensor, stored in tensors:
        if stored.parts[0].wanted is not None:
            yield from _pieces_of_rows(tensor, stored)
            continue
        flat, first = tensor.view(-1), 0
        for part in stored.parts:
            size = part.dtype.itemsize
            for start in range(0, part.bytes, _PIECE):
                count = min(_PIECE, part.bytes - start)
                target = flat[first + start // size : first + (start + count) // size]
                yield _Piece(part.path, part.offset + start, count, part.dtype, target)
            first += part.shape.numel()


def _pieces_of_rows(tensor: Tensor, stored: Lying) -> Iterator[_Piece]:
    """Stretches of whole rows, of which some columns are wanted."""
    row = 0
    for part in stored.parts:
        at_once = max(1, _PIECE // max(1, part.shape[1:].numel() * part.dtype.itemsize))
        for start in range(0, part.shape[0], at_once):
            some = part.rows(start, min(at_once, part.shape[0] - start))
            target = tensor[row + start : row + start + some.shape[0]]
            yield _Piece(some.path, some.offset, some.bytes, some.dtype, target, some.wanted)
        row += part.shape[0]


def _fill(buffer: memoryview, file: BinaryIO, path: Path) -> None:
    while len(buffer):
        count = file.readinto(buffer)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{path} ends too early")
        buffer = buffer[count:]
