"""The only place that chooses a kernel: once per run, written to the log, never silently changed later.

An *op* is what a layer asks for, by the name of its folder here. Each has a *form* in plain PyTorch and a fast one: a
module, or a class, with the op's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.kernels.ccgqa.plain import PlainCcgqa
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.kernels.nsa.plain import PlainNsa
from tuningfork.kernels.row_logps import plain as plain_rows

Sizes = Mapping[str, int]
"""What a model asks of an op's form, such as the width of its attention heads: keywords of the functions of _FAST."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run, by op.

    forms: what runs each op.
    names: of these forms; they go into the log and the reference's fingerprint.
    """

    forms: Mapping[str, Any]
    names: Mapping[str, str]

    def __getitem__(self, op: str) -> Any:
        return self.forms[op]

    def __deepcopy__(self, _: Any) -> Kernels:
        return self  # nothing in it changes, and modules have no copies


def select(ops: Mapping[str, Sizes], device: torch.device, dtype: torch.dtype) -> Kernels:
    """Choose kernels for the ops that a model and its head ask for: Triton on a GPU, plain elsewhere.

    One choice serves all layers, also where they differ in their sizes.

    Raises:
        ModelError: sizes are larger than the GPU's kernel takes.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return plain(ops)
    chosen = {op: _FAST[op](**sizes) for op, sizes in ops.items()}
    return Kernels({op: form for op, (_, form) in chosen.items()}, {op: name for op, (name, _) in chosen.items()})


def plain(ops: Iterable[str] | None = None) -> Kernels:
    """The plain kernels of some ops, or of all: what every fast one is tested against."""
    wanted = tuple(_PLAIN if ops is None else ops)
    return Kernels({op: _PLAIN[op] for op in wanted}, dict.fromkeys(wanted, "plain"))


# --- the ops and their forms ------------------------------------------------------------------------------------------


def _fork_attention(head_width: int) -> tuple[str, Any]:
    from tuningfork.kernels.attention.fork import WIDEST_HEAD, ForkAttention

    if head_width > WIDEST_HEAD:
        raise ModelError(
            f"Attention on a GPU takes heads up to {WIDEST_HEAD} wide, these have {head_width}. Use train.device: cpu."
        )
    return "fork", ForkAttention


def _triton_causal_conv(width: int) -> tuple[str, Any]:
    from tuningfork.kernels.causal_conv.fast import WIDEST, TritonCausalConv

    if width > WIDEST:
        raise ModelError(
            f"Convolutions on a GPU take up to {WIDEST} tokens, these have {width}. Use train.device: cpu."
        )
    return "triton", TritonCausalConv


def _triton_ccgqa(head_width: int, depthwise: int, grouped: int) -> tuple[str, Any]:
    from tuningfork.kernels.ccgqa.fast import WIDEST, WIDEST_HEAD, TritonCcgqa

    if max(depthwise, grouped) > WIDEST or head_width > WIDEST_HEAD:
        raise ModelError(
            f"CCGQA on a GPU takes heads up to {WIDEST_HEAD} wide and convolutions of up to {WIDEST} tokens; here they "
            f"are {head_width} wide, and of {depthwise} and {grouped} tokens. Use train.device: cpu."
        )
    return "triton", TritonCcgqa


def _triton_gated_delta(key_width: int, value_width: int) -> tuple[str, Any]:
    from tuningfork.kernels.gated_delta.fast import WIDEST_KEY, TritonGatedDelta

    if key_width > WIDEST_KEY:  # values of any width do: they are taken some columns at a time
        raise ModelError(
            f"The gated delta rule on a GPU takes keys up to {WIDEST_KEY} wide, these have {key_width}, "
            f"beside values of {value_width}. Use train.device: cpu."
        )
    return "triton", TritonGatedDelta


def _triton_nsa(key_width: int, value_width: int) -> tuple[str, Any]:
    from tuningfork.kernels.nsa.fast import WIDEST_HEAD, TritonNsa

    if max(key_width, value_width) > WIDEST_HEAD:
        raise ModelError(
            f"Native sparse attention on a GPU takes heads up to {WIDEST_HEAD} wide, these have keys {key_width} and "
            f"values {value_width} wide. Use train.device: cpu."
        )
    return "triton", TritonNsa


def _triton_row_logps() -> tuple[str, Any]:
    from tuningfork.kernels.row_logps import fast

    return "triton", fast


_PLAIN: dict[str, Any] = {
    "attention": PlainAttention,
    "causal_conv": PlainCausalConv,
    "ccgqa": PlainCcgqa,
    "gated_delta": PlainGatedDelta,
    "nsa": PlainNsa,
    "row_logps": plain_rows,
}
_FAST: dict[str, Callable[..., tuple[str, Any]]] = {
    "attention": _fork_attention,
    "causal_conv": _triton_causal_conv,
    "ccgqa": _triton_ccgqa,
    "gated_delta": _triton_gated_delta,
    "nsa": _triton_nsa,
    "row_logps": _triton_row_logps,
}
"""Name and form of each op's fast kernel for some sizes; Triton is imported only where it is used."""
