"""Layers whose `forward` is ours: how it is put in the place of their class's, taken out again, and called.

transformers' layers that are no attention look no function up. A module beside this one for each kind of them makes the
same products with the same weights, and has what runs along a pack from a keyword of the model call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tuningfork.errors import ModelError
from tuningfork.models.hf.attention import HARMLESS
from tuningfork.models.hf.kinds import with_forward
from tuningfork.models.mixers import attention, ccgqa, gated_delta, short_conv

_MIXERS = {attention.KEYWORD, ccgqa.KEYWORD, gated_delta.KEYWORD, short_conv.KEYWORD}
_CACHES = ("cache", "cache_params", "past_key_values")  # in one version of the library or another

_theirs: dict[type, type[nn.Module]] = {}  # of a class of ours, the one whose place it takes


def put(layer: Any, forward: Callable[..., Tensor]) -> None:
    """Have a layer run `forward(layer, ...)`. It may be called again."""
    theirs = class_of(layer)
    layer.__class__ = with_forward(theirs, forward)
    _theirs[type(layer)] = theirs


def class_of(layer: nn.Module) -> type[nn.Module]:
    """A layer's class as the library has it."""
    return _theirs.get(type(layer), type(layer))


@contextmanager
def taken_out(model: nn.Module) -> Iterator[None]:
    """The model with its class's own layers, which know of no pack: for single sequences alone."""
    ours = [(layer, type(layer)) for layer in model.modules() if type(layer) in _theirs]
    for layer, _ in ours:
        layer.__class__ = class_of(layer)
    try:
        yield
    finally:
        for layer, kind in ours:
            layer.__class__ = kind


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
