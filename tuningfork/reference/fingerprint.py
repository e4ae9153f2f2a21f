"""What reference log-probs depend on besides the example itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

import torch
import xxhash
from torch import Tensor, nn

from tuningfork.reference.code import scoring_digest

LAYOUT_VERSION = "5"  # raised with the digest of weights, the keys or files of a cache, or the steps of a layout

_PIECE = 16 << 20  # bytes hashed at once; part of what the digest is, so a change of it raises LAYOUT_VERSION
_THREADS = min(8, os.cpu_count() or 1)


def fingerprint(weights: str, **facts: str) -> dict[str, str]:
    """Everything that decides a log-prob's bits: the weights' digest, `facts` such as dtype, kernels, device, the code
    that scores, and the libraries under it.

    Two runs may share cached log-probs exactly if their fingerprints are equal.
    """
    return {
        "weights": weights,
        **facts,
        "code": scoring_digest(),
        "layout": LAYOUT_VERSION,
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All that a model computes with, by name: weights, and buffers, whether they are stored with it or computed."""
    return [*model.named_parameters(), *model.named_buffers()]


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A 128-bit content hash of named tensors: names, shapes, dtypes and bytes, on whatever device they lie.

    It is the hash of the hashes of pieces, which several threads make: one alone would be slower than any disk that the
    weights come from.
    """
    digest = xxhash.xxh3_128()
    with ThreadPoolExecutor(_THREADS, "hashing weights") as pool:
        hashed = []
        for name, tensor in sorted(weights):
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            head = f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode()
            hashed.append((head, pool.map(_piece_digest, data.split(_PIECE))))
        for head, pieces in hashed:
            digest.update(head)
            for piece in pieces:
                digest.update(piece)
    return digest.hexdigest()


def _piece_digest(piece: Tensor) -> bytes:
    """The hash of some bytes; those of a GPU come by pinned memory, of which PyTorch keeps a block for each thread."""
    if piece.is_cuda:
        there, piece = piece, torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
        piece.copy_(there, non_blocking=True)
        torch.cuda.current_stream(there.device).synchronize()
    return xxhash.xxh3_128_digest(piece.numpy().data)


def _triton_version() -> str:
    """Triton compiles our kernels and the compiler's; a machine without a GPU may have none."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def text_digest(text: str) -> str:
    """A 128-bit content hash of a text, such as a config."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def differing_facts(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(fact, our value, their value), where the two fingerprints differ."""
    keys = [*ours, *(key for key in theirs if key not in ours)]
    pairs = [(key, ours.get(key, "absent"), theirs.get(key, "absent")) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]
