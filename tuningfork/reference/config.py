"""Settings of the reference cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass
class ReferenceConfig:
    """Where the frozen model's log-probs are kept."""

    cache: Annotated[str, Field(min_length=1)] = "./reference-cache"
    """Folder of the cache, which runs from any number of models share. It has an entry for each set-up that decides a
    bit of a log-prob: the model, its precision, the device, the code. None is ever removed for another."""
