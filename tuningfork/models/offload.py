"""Block inputs in host memory from a block's forward pass to its backward pass.

With every block recomputed in the backward pass, its input is all that is kept of it. On a GPU these inputs are copied
to pinned host memory on a stream of their own: the copy goes on while the block itself is computed, and the backward
pass asks for an input one block before it is needed. On a CPU the same steps are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Offload:
    """The way to host memory and back for all blocks of a model. Blocks run in their order, the first one first.

    On a GPU no memory is handed over between streams by `record_stream`: the allocator would then wait for the device
    before it uses it again, while the host is a whole pass ahead. Instead the computing stream waits for a copy before
    the memory is let go, one block later, by when the copy is done.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._leaving: Tensor | None = None  # an input that is being copied to the host
        self._last: ref[_Kept] | None = None  # held by its graph alone, so it goes when the graph goes

    def around(self, run: Callable[..., Any], first: bool) -> Callable[..., Any]:
        """A block's forward that is recomputed in the backward pass, from an input that waits in host memory.

        Args:
            run: a block's forward; its first argument holds the hidden states, [1, T, D].
            first: whether it is the model's first block.
        """

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(hidden_states, *args, **kwargs)
            kept = self._keep(hidden_states, first)
            out = checkpoint(
                lambda: run(kept.take(), *args, **kwargs),
                use_reentrant=False,
                preserve_rng_state=False,  # models with dropout are refused
            )
            kept.live = None
            return out

        return forward

    def _keep(self, hidden: Tensor, first: bool) -> _Kept:
        if hidden.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        self.wait()
        kept = _Kept(self, hidden, None if first or self._last is None else self._last())
        self._last = ref(kept)
        if self._stream is not None:
            self._leaving = hidden.detach()
        return kept

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy between host and device, behind all that was launched so far."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Let what is computed from now on wait for the copies that were started."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._leaving = None

    def drop(self, tensor: Tensor) -> None:
        """Let go of a tensor on the device although a copy into it may be under way."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class _Kept:
    """One block's input in one forward pass."""

    _fetched: Tensor | None = None

    def __init__(self, way: Offload, hidden: Tensor, before: _Kept | None) -> None:
        self.live: Tensor | None = hidden  # with its history, while the forward pass runs
        self._way, self._before = way, before
        self._device, self._requires_grad = hidden.device, hidden.requires_grad
        # PyTorch keeps pinned memory for the next tensor of the size: pinning anew each time would be slow.
        self._host = torch.empty_like(hidden, device="cpu", pin_memory=hidden.is_cuda, requires_grad=False)
        way.copy(self._host, hidden.detach())

    def take(self) -> Tensor:
        """The input: the forward pass's own tensor while that runs, a copy from the host afterwards."""
        if self.live is not None:
            return self.live
        hidden, self._fetched = self._fetch(), None
        self._way.wait()
        if self._before is not None:
            self._before._fetch()
        return hidden.requires_grad_(self._requires_grad)

    def _fetch(self) -> Tensor:
        """The copy from the host, which may be under way."""
        if self._fetched is None:
            # Made in the stream that will use it, so that its memory goes around there.
            self._fetched = torch.empty_like(self._host, device=self._device)
            self._way.copy(self._fetched, self._host)
        return self._fetched

    def __del__(self) -> None:
        if self._fetched is not None:  # asked for ahead, and then the backward pass went no further
            self._way.drop(self._fetched)
