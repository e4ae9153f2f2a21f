"""What of the output projection lies where: a vocabulary that processes share, and where its gradient is added up.

The head (head.py) asks these two and does not know. On one process it has every row of the weight, and adds its
gradient to `weight.grad`. Where weights are spread over processes, a gradient is kept over the packs of a step, in
float32, and travels once. Where a tensor group shares the vocabulary, each process has some rows of the weight, and
computes the logits of those tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from tuningfork.kernels.logits import transformed
from tuningfork.records import LogitTransform


class Vocabulary:
    """All of it, on this process."""

    def row_logps(
        self, kernel: ModuleType, logits: Tensor, targets: Tensor, transform: LogitTransform
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of rows and the parts of their log-sum-exp over the whole vocabulary, as kernels/row_logps has
        them, from the logits [r, v] of this process's tokens."""
        return kernel.row_logps(logits, targets, transform)

    def own(self, targets: Tensor) -> Tensor:
        """Where targets lie among this process's tokens; -1 for another's."""
        return targets

    def summed(self, d_rows: Tensor) -> Tensor:
        """The gradient of hidden rows from all tokens, from that of this process's."""
        return d_rows


WHOLE = Vocabulary()


class Fellows(Protocol):
    """Processes that compute together: distributed/sums.py."""

    def all(self, part: Tensor) -> Tensor: ...

    def sum(self, part: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SharedVocabulary(Vocabulary):
    """The tokens from `first` on, `size` of them; the processes of a group have the others.

    Of a row each process has its largest logit and the log-sum of the rest relative to that, which are joined in the
    order of the ranks; the target's logit comes from the process that has it.
    """

    first: int
    size: int
    fellows: Fellows

    def row_logps(
        self, kernel: ModuleType, logits: Tensor, targets: Tensor, transform: LogitTransform
    ) -> tuple[Tensor, Tensor]:
        own = self.own(targets)
        place = own.clamp(min=0)
        _, lse = kernel.row_logps(logits, place, transform)
        picked = transformed(logits.gather(1, place[:, None])[:, 0], transform).masked_fill(own < 0, 0)
        tops, rests, picks = self.fellows.all(torch.stack([*lse.unbind(1), picked])).unbind(1)
        top = tops.amax(0)
        rest = _in_order(torch.exp((tops - top) + rests)).log()
        return (_in_order(picks) - top) - rest, torch.stack([top, rest], dim=1)

    def own(self, targets: Tensor) -> Tensor:
        own = targets - self.first
        return own.masked_fill((own < 0) | (own >= self.size), -1)

    def summed(self, d_rows: Tensor) -> Tensor:
        return self.fellows.sum(d_rows)


def _in_order(parts: Tensor) -> Tensor:
    """The sum of parts [n, r] one by one."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Gradient:
    """Adds up the gradient of a weight [V, D] or of a bias [V], in float32 at least, over the chunks of a pack; and
    over the packs of a step, where `weight.grad` has that precision."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._wanted = weight.requires_grad
        self._dtype = torch.promote_types(weight.dtype, torch.float32)
        in_place = weight.grad is not None and weight.grad.dtype == self._dtype
        self._total = weight.grad if in_place else None

    def add_outer(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Add d_logitsᵀ [V, r] · hidden [r, D]."""
        if self._wanted:
            self._total = product(d_logits.t(), hidden, self._dtype, self._total)

    def add_sum(self, d_logits: Tensor) -> None:
        """Add the sum of the rows of d_logits [r, V]."""
        if self._wanted:
            more = d_logits.sum(0, dtype=self._dtype)
            self._total = more if self._total is None else self._total.add_(more)

    def store(self) -> None:
        """Behind a pack: bring the sum to `weight.grad`."""
        weight, total = self._weight, self._total
        if not self._wanted or total is weight.grad is not None:
            return
        total = torch.zeros_like(weight, dtype=weight.grad_dtype) if total is None else total.to(weight.grad_dtype)
        weight.grad = total if weight.grad is None else weight.grad.add_(total)


class StepGradient(Gradient):
    """The same over all packs of a step, whatever the weight's dtype: it is rounded to that when it is taken."""

    def __init__(self, weight: Tensor, wanted: bool) -> None:
        super().__init__(weight)
        self._wanted = wanted
        self._total = None

    def store(self) -> None:
        """It stays."""

    def take(self) -> Tensor | None:
        """Behind the last pack: the sum, float32 or better; None where the weight is frozen."""
        if not self._wanted:
            return None
        total, self._total = self._total, None
        return torch.zeros_like(self._weight, dtype=self._dtype) if total is None else total


@dataclass(frozen=True, slots=True)
class Output:
    """The output projection as this process has it.

    weight: [v, D], and bias: [v] or None, of the tokens that are this process's.
    gradients: where theirs are added up.
    """

    weight: Tensor
    bias: Tensor | None = None
    vocabulary: Vocabulary = WHOLE
    gradients: tuple[Gradient, Gradient | None] | None = None


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32, total: Tensor | None = None) -> Tensor:
    """a·b, added up and given in `dtype` or the factors' own, whichever is wider; added to `total` where there is one.

    Never rounded to less on the way: a GPU multiplies bfloat16 into float32, and elsewhere the factors are cast.
    """
    dtype = torch.promote_types(a.dtype, dtype)
    mixed: dict[str, Any] = {}
    if a.dtype != dtype:
        if a.is_cuda and dtype == torch.float32:
            mixed = {"out_dtype": dtype}
        else:
            a, b = a.to(dtype), b.to(dtype)
    if total is None:
        return torch.mm(a, b, **mixed)
    return torch.addmm(total, a, b, out=total, **mixed)
