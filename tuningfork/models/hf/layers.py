"""Layers whose `forward` is ours: how it is put in the place of their class's, taken out again, and called.

transformers' layers that are no attention look no function up. A module beside this one for each kind of them makes the
same products with the same weights, and has what runs along a pack from a keyword of the model call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from tuningfork.errors import ModelError
from tuningfork.models.hf.attention import HARMLESS
from tuningfork.models.mixers import attention, ccgqa, gated_delta, short_conv

_MIXERS = {attention.KEYWORD, ccgqa.KEYWORD, gated_delta.KEYWORD, short_conv.KEYWORD}
_CACHES = ("cache", "cache_params", "past_key_values")  # in one version of the library or another

_ours: set[Callable[..., Tensor]] = set()


def put(layer: Any, forward: Callable[..., Tensor]) -> None:
    """Have a layer run `forward(layer, ...)`."""
    _ours.add(forward)
    layer.forward = partial(forward, layer)


@contextmanager
def taken_out(model: nn.Module) -> Iterator[None]:
    """The model with its class's own layers, which know of no pack: for single sequences alone."""
    forwards = [(module, vars(module).get("forward")) for module in model.modules()]
    ours = [(layer, forward) for layer, forward in forwards if isinstance(forward, partial) and forward.func in _ours]
    for layer, _ in ours:
        del layer.forward
    try:
        yield
    finally:
        for layer, forward in ours:
            layer.forward = forward


def prepared(layer: Any, keyword: str, what: str, mask: Tensor | None, keywords: dict[str, Any]) -> Any:
    """What the model call hands on under `keyword`, for a layer that is called with a mask and these keywords.

    Args:
        what: in words, the mixer that must not ignore anything.

    Raises:
        ModelError: there is nothing, or what `what` would ignore.
    """
    kind = type(layer).__name__
    if any(keywords.get(name) is not None for name in _CACHES):
        raise ModelError(f"{kind} is given a cache: packs are no place to generate in. Call the model with none.")
    if mask is not None:
        raise ModelError(f"{kind} is given a mask, which a pack has not: its layout says who sees whom.")
    for name, given in keywords.items():
        if given is not None and given is not False and name not in HARMLESS | _MIXERS:
            raise ModelError(
                f"layers of this model ({kind}) take {name!r} into account, which {what} does not know. Not supported."
            )
    if keywords.get(keyword) is None:
        raise ModelError(
            f"layers of this model ({kind}) are not told which tokens belong to one example: its blocks do not hand on "
            "what the model is given. Not supported."
        )
    return keywords[keyword]
