"""Named ranges around the phases of a run, as nsys and torch.profiler show them; none unless somebody asks for them.

A range stands around calls of compiled code and never within it, so graphs and bits are the same with ranges and
without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

_NONE = nullcontext()
_on = False


@contextmanager
def ranges(on: bool) -> Iterator[None]:
    """Within it, `phase` makes ranges, if they are `on`."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def phase(name: str) -> AbstractContextManager[None]:
    """A range of this name around what is done within, by this thread: an NVTX range where there is a GPU, and one of
    `torch.profiler.record_function`, which the profiler calls a user annotation. Nothing, where ranges are off."""
    return _range(name) if _on else _NONE


@contextmanager
def _range(name: str) -> Iterator[None]:
    import torch

    with ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield
