"""Settings of the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass
class ObjectiveConfig:
    """Which loss is minimised. docs/glossary.md gives each formula."""

    name: Literal["dpo", "dpo_norm", "ipo", "ipo_sum", "simpo"] = "dpo"
    """dpo; dpo_norm and ipo (log-ratios per token); ipo_sum (the paper's sums); simpo (without a reference)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the pull towards the reference; for simpo, the scale of the per-token reward."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference label is wrong. dpo and dpo_norm only."""
    gamma: Annotated[float, Field(ge=0)] | None = None
    """Target margin, simpo only; 0.5 unless set."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the SFT term: mean negative log-prob over the chosen tokens of the whole batch."""
    head_chunk_rows: Annotated[int, Field(ge=1)] = 4096
    """Logit rows projected at once. Fewer need less memory: logits take 4 bytes each, and their gradient 2 more in
    bfloat16: 3.5 GiB for 4096 rows and a vocabulary of 151,936. No bit of a log-prob changes; gradients, which are
    added up over the chunks, are rounded differently. May change on --resume."""
