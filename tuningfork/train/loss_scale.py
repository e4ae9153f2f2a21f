"""The loss scale of a run in float16: what gradients are multiplied by, so that small ones do not become 0.

float16 has no number between 0 and 6e-8, where most gradients of a large batch would lie, and none above 65,504. So the
head multiplies the gradient that it begins with, all others follow from that one, and the optimizer divides. A scale
that is too large makes one of them infinite: such a step does not move the weights, and the next scale is half of it.
The rule is that of mixed precision training (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), with PyTorch's
numbers (torch.amp.GradScaler). All scales are powers of two, so they round nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from tuningfork.errors import NonFiniteError

CLEAN_STEPS = 2000
"""After so many steps in a row that moved the weights, the scale doubles."""
LEAST = 1.0
"""Gradients that are not finite at this scale are not made so by a smaller one."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Where the scale of a run stands; a part of its checkpoints."""

    scale: Annotated[float, Field(gt=0)] = 65536.0  # of the next step
    clean: Annotated[int, Field(ge=0)] = 0  # steps since it last changed, none of which was skipped
    skipped: Annotated[int, Field(ge=0)] = 0  # steps of the run so far that did not move the weights

    def after(self, skipped: bool) -> LossScale:
        """The scale behind a step. Raises NonFiniteError where no smaller one is of use."""
        if skipped:
            if self.scale <= LEAST:
                raise NonFiniteError(f"gradients are not finite in float16, at a loss scale of {self.scale:g}.")
            return LossScale(self.scale / 2, 0, self.skipped + 1)
        if self.clean + 1 == CLEAN_STEPS:
            return replace(self, scale=2 * self.scale, clean=0)
        return replace(self, clean=self.clean + 1)
