"""Gradients of embeddings that have the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 8  # steps of a module behind the look-up itself: scales, masks, casts, sums over processes


def repeat_gradients(model: nn.Module) -> None:
    """Let every embedding of a model have its gradient added up in one order.

    Where few tokens have many rows each, as bytes and positions do, PyTorch adds them up on a GPU in whatever order its
    threads come by, from 2.11 on. It does not where deterministic algorithms are asked for. They are asked for around
    this one addition: through a whole backward pass they would be a new state for the compiler, which would compile
    blocks that are computed again a second time, and other operations would take slower ways to bits that repeat
    anyway. What asks is one switch of the process, so what other threads begin meanwhile sees it, too.
    """
    for module in model.modules():
        # private: torch.nn.Module._forward_hooks
        if isinstance(module, nn.Embedding) and _repeat_gradient not in module._forward_hooks.values():
            module.register_forward_hook(_repeat_gradient)


@contextmanager
def switched_back() -> Iterator[None]:
    """Around a backward pass, which may fail in the very addition: nothing stays asked for that was not before."""
    before = _state()
    try:
        yield
    finally:
        _switch(*before)


def _state() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _switch(asked: bool, warn_only: bool) -> None:
    """As `torch.use_deterministic_algorithms`, which would also write over an option of the compiler."""
    # private: torch._C._set_deterministic_algorithms
    torch._C._set_deterministic_algorithms(asked, warn_only=warn_only)


def _repeat_gradient(_module: nn.Module, _args: Any, embedded: Tensor) -> None:
    node = _look_up(embedded.grad_fn, _DEEPEST)
    if node is None:  # no gradient is asked for
        return
    before: list[tuple[bool, bool]] = []

    def ask(_gradients: Any) -> None:
        before.append(_state())
        if not before[-1][0]:
            _switch(True, warn_only=True)

    def restore(_inputs: Any, _outputs: Any) -> None:
        _switch(*before.pop())

    node.register_prehook(ask)
    node.register_hook(restore)


def _look_up(node: Any, steps: int) -> Any:
    """The node of the graph by which rows of a weight were looked up, in the history of a result; None if none is."""
    if node is None or node.name().startswith("EmbeddingBackward"):
        return node
    if steps == 0:
        return None
    found = (_look_up(earlier, steps - 1) for earlier, _ in node.next_functions)
    return next((one for one in found if one is not None), None)
