"""Every objective that there is, by the name that recipes give it."""

from __future__ import annotations

from tuningfork.objective import lm, pairs, sft
from tuningfork.objective.base import Objective

OBJECTIVES: dict[str, type[Objective]] = {**pairs.OBJECTIVES, **sft.OBJECTIVES, **lm.OBJECTIVES}


def readers(setting: str) -> list[str]:
    """The names of the objectives that read a setting."""
    return [name for name, kind in OBJECTIVES.items() if setting in kind.settings()]
