"""A checkpoint that is written while the run goes on: its tensors are copied to the host first, then a thread writes.

The copies keep their memory from one checkpoint to the next: as much as this process has of weights and moments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

LAST_WORDS = 60.0
"""Seconds that a run which fails leaves to the checkpoint in the writing: mostly enough for it to become whole."""


class Staging:
    """Memory of the host for a copy of a state, taken when it is first needed."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, state: Mapping[str, Any]) -> StagedPlanner:
        """Copy what this process has of a state's tensors: what plans to save that state then saves these copies."""
        tensors = [*_tensors(state)]
        own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        if not self._buffers:
            self._buffers = [_on_host(tensor) for tensor in own]
        for buffer, tensor in zip(self._buffers, own, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in own):
            torch.cuda.current_stream().synchronize()
        return StagedPlanner({id(tensor): buffer for tensor, buffer in zip(tensors, self._buffers, strict=True)})


class StagedPlanner(DefaultSavePlanner):
    """Plans as for the tensors of a state themselves, and saves copies of them: `copies` has those by `id` of the
    tensor, which has not moved as long as the state is there."""

    def __init__(self, copies: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[id(self.state_dict[index.fqn])]


class Beside:
    """One thing at a time that is done in a thread. What it fails with is raised by who waits for it, and never lost:
    whoever begins the next thing, or ends, waits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether there is a failure that nobody has waited for yet."""
        return self._failure is not None

    def begin(self, work: Callable[[], object]) -> None:
        """Do this in a thread, once that before it is done."""
        self.wait()
        # A daemon, for a process that ends by an error must not wait for others that may be gone: see `let_end`.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is done, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def let_end(self) -> None:
        """Give it some time to be done, where the run has failed and says so itself."""
        if self._thread is not None:
            self._thread.join(LAST_WORDS)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as failure:
            self._failure = failure


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of a state, in its order."""
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        else:
            yield value


def _on_host(tensor: Tensor) -> Tensor:
    """Memory for a copy of a tensor: page-locked for one of a GPU, which then copies at the full speed of its link."""
    if hasattr(tensor, "__tensor_flatten__"):  # made of several, as moments in 8 bits are
        parts, rest = tensor.__tensor_flatten__()
        copies = {part: getattr(tensor, part).detach().cpu().clone() for part in parts}
        return type(tensor).__tensor_unflatten__(copies, rest, tensor.shape, tensor.stride())  # type: ignore[attr-defined,no-any-return]
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
