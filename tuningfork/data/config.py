"""Settings of the data room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass
class DataConfig:
    """Which rows are read and how they become tokens."""

    train: str = ""
    """Preference pairs to train on: JSONL, JSON or Parquet, plain or gzipped."""
    eval: Annotated[str, Field(min_length=1)] | None = None
    """Held-out pairs in any of the same formats; scored before and after training."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Tokens of the longest sequence (prompt + one answer). A longer example is dropped whole and listed."""
    template: Literal["chat", "none"] = "chat"
    """chat: the tokenizer's chat template; plain strings become a user and an assistant turn. none: text as it is."""


@dataclass
class PackConfig:
    """How examples share a pack."""

    tokens: Annotated[int, Field(ge=64)] = 8192
    """Rows of a full pack. Larger packs run faster and need more memory; the numbers do not change."""
    share_prompt: bool = True
    """Store and compute each prompt once for all of its answers."""
