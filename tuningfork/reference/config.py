"""Settings of the reference cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass
class ReferenceConfig:
    """Where the frozen model's log-probs are kept."""

    cache: Annotated[str, Field(min_length=1)] = "./reference-cache"
    """Folder of the cache. One folder serves one starting model; runs with the same model share it."""
