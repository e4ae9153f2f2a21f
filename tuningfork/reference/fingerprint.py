"""What reference log-probs depend on besides the example itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

LAYOUT_VERSION = "3"  # raised whenever a change of ours may change a bit of a log-prob


def fingerprint(weights: Iterable[tuple[str, Tensor]], **facts: str) -> dict[str, str]:
    """Everything that decides a log-prob's bits: the weights' content, and `facts` such as dtype, kernels, device.

    Two runs may share cached log-probs exactly if their fingerprints are equal.
    """
    return {
        "weights": weights_digest(weights),
        **facts,
        "layout": LAYOUT_VERSION,
        "torch": torch.__version__,
    }


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A 128-bit content hash of named tensors: names, shapes, dtypes and bytes."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(weights):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """A 128-bit content hash of a text, such as a config."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(fact, our value, their value), where the two fingerprints differ."""
    keys = [*ours, *(key for key in theirs if key not in ours)]
    pairs = [(key, ours.get(key, "absent"), theirs.get(key, "absent")) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]
