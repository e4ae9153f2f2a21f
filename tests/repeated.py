"""Cases that repeat what others of the same test try: left out unless asked for by -m slow."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """One case of a parametrized test, marked as slow; `id` as pytest.param has it."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
