"""Modules whose `forward` is another than their class's, and that are alike to the compiler all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_MADE: dict[tuple[type[nn.Module], Callable[..., Any]], type[nn.Module]] = {}


def with_forward(theirs: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A class like another, name and all, with another forward: the same one for the same two.

    The compiler takes modules of one class for alike, so that they share a graph. A function bound to one module is to
    it another function than that of the next: a graph for each of them.
    """
    if (theirs, forward) not in _MADE:
        _MADE[theirs, forward] = type(theirs.__name__, (theirs,), {"forward": forward})
    return _MADE[theirs, forward]
