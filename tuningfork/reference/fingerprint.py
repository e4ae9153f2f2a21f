"""What reference log-probs depend on besides the example itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

import torch
import xxhash
from torch import Tensor, nn

from tuningfork.reference.code import scoring_digest

LAYOUT_VERSION = "6"  # raised with the digest of weights, the keys or files of a cache, or the steps of a layout

_PIECE = 16 << 20  # bytes that a thread takes at once
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


def _whole(tensor: Tensor) -> tuple[Tensor, int] | None:
    return tensor, 0


def weights_digest(
    weights: Iterable[tuple[str, Tensor]],
    rows_here: Callable[[Tensor], tuple[Tensor, int] | None] = _whole,
    all_shares: Callable[[int], Iterable[int]] = lambda own: [own],
) -> str:
    """A 128-bit content hash of named tensors: names, shapes, dtypes and bytes, however they lie on devices.

    It is a sum, modulo 2^128, of the hash of each row of each tensor, so that processes that have some rows each need
    only add up what they found. The place of a row, and what it is a row of, is in the seed of its hash. A tensor of
    less than two dimensions is one row.

    Args:
        rows_here: the rows of a tensor that this process is to count, and the number of the first; None for none.
        all_shares: the sums of all processes, from that of this one.
    """
    heads = 0
    with ThreadPoolExecutor(_THREADS, "hashing weights") as pool:
        hashed = []
        for name, tensor in weights:
            head = f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode()
            heads += xxhash.xxh3_128_intdigest(head)  # also of what has no rows
            found = rows_here(tensor.detach())
            if found is not None and found[0].numel():
                hashed.append(pool.map(_rows_digest, *_pieces(*found, xxhash.xxh3_64_intdigest(head))))
        own = sum(digest for digests in hashed for digest in digests)
    return f"{(heads + sum(all_shares(own))) % (1 << 128):032x}"


def _pieces(rows: Tensor, start: int, seed: int) -> tuple[list[Tensor], list[int]]:
    """Bytes [n, bytes of a row] that a thread hashes at once, and the seed of the first row of each."""
    data = rows.contiguous()
    data = data.view(len(rows) if rows.ndim > 1 else 1, -1).view(torch.uint8)
    pieces = data.split(max(1, _PIECE // data.shape[1]))
    firsts = accumulate((len(piece) for piece in pieces[:-1]), initial=seed + start)
    return list(pieces), list(firsts)


def _rows_digest(piece: Tensor, seed: int) -> int:
    """The sum of the hashes of some rows; those of a GPU come by pinned memory, of which PyTorch keeps a block for each
    thread."""
    if piece.is_cuda:
        there, piece = piece, torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
        piece.copy_(there, non_blocking=True)
        torch.cuda.current_stream(there.device).synchronize()
    data, width = piece.view(-1).numpy().data, piece.shape[1]
    ends = range(0, len(data), width)
    return sum(xxhash.xxh3_128_intdigest(data[at : at + width], (seed + n) % (1 << 64)) for n, at in enumerate(ends))


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
