"""A harmless stand-in for the code that somebody hides in a file: where it is run, it leaves a file behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Payload:
    """Pickled, it is a program that makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)
