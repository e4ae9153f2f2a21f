"""A safetensors file that is written tensor by tensor, so that no more than one of them need be in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tuningfork.files import Hashed
from tuningfork.models.hf.safetensors_reader import NAMES

_ALIGNED = 8  # bytes; the header's length is a multiple of it

Forms = Mapping[str, tuple[torch.Size, torch.dtype]]
"""What a file holds: name -> shape and dtype."""


def written(path: Path, forms: Forms) -> Generator[None, Tensor, str]:
    """Write a new file of tensors on the CPU, which are sent in the order of `in_order`; returns its checksum.

    The file is on the disk once the last one is there. Raises OSError where the disk refuses.
    """
    with path.open("xb") as file:
        hashed = Hashed(file)
        header = _header(forms)
        hashed.write(len(header).to_bytes(8, "little") + header)
        for name in in_order(forms):
            tensor = yield
            assert (tensor.shape, tensor.dtype) == forms[name], name
            if tensor.numel():
                hashed.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one comes
        file.flush()
        os.fsync(file.fileno())
    return hashed.checksum()


def in_order(forms: Forms) -> list[str]:
    """The names in the order of the file: as the library has it, wide elements first, so that all lie aligned."""
    return sorted(forms, key=lambda name: (-forms[name][1].itemsize, name))


def _header(forms: Forms) -> bytes:
    """What stands before the numbers, as the library writes it of a model of PyTorch."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in in_order(forms):
        shape, dtype = forms[name]
        end = start + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text.ljust(-(-len(text) // _ALIGNED) * _ALIGNED)
