"""Settings of the objective."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tuningfork.objective.base import Objective
from tuningfork.objective.kinds import OBJECTIVES, readers
from tuningfork.objective.sft import MeanOver

if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Literal[tuple(OBJECTIVES)]


@dataclass
class ObjectiveConfig:
    """Which loss is minimised. docs/glossary.md gives each formula."""

    name: ObjectiveName = "dpo"
    """Which loss; docs/glossary.md has the formula of each."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Factor of the rewards: strength of the pull towards the reference, where the objective has one."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference label is wrong."""
    gamma: Annotated[float, Field(ge=0)] | None = None
    """Target margin; the objective's own value unless set (simpo: 0.5)."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the SFT term: mean negative log-prob over the chosen tokens of the whole batch."""
    mean_over: MeanOver = "tokens"
    """What the loss is a mean over, sft only: all counted tokens of a step, or its examples, each by the mean over its
    own tokens."""
    head_chunk_rows: Annotated[int, Field(ge=1)] = 4096
    """Logit rows projected at once. Fewer need less memory: logits take 4 bytes each, and their gradient 2 more in
    bfloat16: 3.5 GiB for 4096 rows and a vocabulary of 151,936. No bit of a log-prob changes; gradients, which are
    added up over the chunks, are rounded differently. May change on --resume."""

    def build(self) -> Objective:
        """The objective that these settings describe."""
        kind = OBJECTIVES[self.name]
        given = {name: getattr(self, name) for name in kind.settings()}
        return kind(**{name: value for name, value in given.items() if value is not None})  # None: the kind's own

    def unread(self) -> dict[str, list[str]]:
        """Settings that the objective of this name does not read though they are set -> the names of those that do."""
        kind, default = OBJECTIVES[self.name], ObjectiveConfig()
        others = {item.name for item in fields(self)} - kind.settings() - {"name", "head_chunk_rows"}
        return {name: readers(name) for name in sorted(others) if getattr(self, name) != getattr(default, name)}
