"""The safetensors files of a model folder, read straight onto a device at the speed of the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import safetensors
import torch
from torch import Tensor

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_THREADS = min(8, os.cpu_count() or 1)  # eight keep a fast disk, or the copies out of the page cache, busy
_PIECE = 16 << 20  # bytes read at once, a multiple of every element's size
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies on the disk, and as what."""

    path: Path
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def stored_tensors(folder: Path) -> dict[str, Stored] | None:
    """The tensors of a folder's safetensors files by name; None where this reader does not know what lies there.

    That is: other formats, element types that PyTorch lacks, a name in two files. Raises what safetensors raises for a
    broken file, ValueError for a broken index, or OSError for a missing file.
    """
    if (folder / ONE_FILE).exists():
        names = [ONE_FILE]
    elif (folder / INDEX).exists():
        names = _named_in(folder / INDEX)
    else:
        return None
    found: dict[str, Stored] = {}
    for path in (folder / name for name in names):
        with safetensors.safe_open(path, framework="pt"):
            pass  # by opening it, the library checks that the header is sound and the file as long as it says
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in found or entry["dtype"] not in _DTYPES:
                return None
            offset = 8 + length + entry["data_offsets"][0]
            found[name] = Stored(path, offset, _DTYPES[entry["dtype"]], torch.Size(entry["shape"]))
    return found


def _named_in(index: Path) -> list[str]:
    """The files that an index names. Raises ValueError where it names none as it should."""
    content = json.loads(index.read_text())
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index.name} has no weight_map of tensor names to file names; get that file anew")
    return sorted(set(files.values()))


def read(
    tensors: Iterable[tuple[Tensor, Stored]], progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Fill contiguous tensors, on any device, with what lies on the disk, cast to their dtype there.

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

    def read(self, buffers: SimpleQueue[Tensor]) -> int:
        """Fill the target by way of a free buffer; the bytes read."""
        device = self.target.device
        buffer = buffers.get()
        try:
            host = buffer[: self.bytes]
            with self.path.open("rb", buffering=0) as file:  # its own, so that the kernel reads ahead in each
                file.seek(self.offset)
                _fill(host.numpy().data, file, self.path)
            self.target.copy_(host.view(self.dtype).to(device, non_blocking=True))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the other threads read meanwhile
        finally:
            buffers.put(buffer)
        return self.bytes


def _pieces(tensors: Iterable[tuple[Tensor, Stored]]) -> Iterator[_Piece]:
    for tensor, stored in tensors:
        flat, size = tensor.view(-1), stored.dtype.itemsize
        for start in range(0, stored.bytes, _PIECE):
            count = min(_PIECE, stored.bytes - start)
            target = flat[start // size : (start + count) // size]
            yield _Piece(stored.path, stored.offset + start, count, stored.dtype, target)


def _fill(buffer: memoryview, file: BinaryIO, path: Path) -> None:
    while len(buffer):
        count = file.readinto(buffer)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{path} ends too early")
        buffer = buffer[count:]
