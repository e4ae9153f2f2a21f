"""Small JSON files that others may have written or spoilt: read with bounds, and refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuningfork.files import opened

LARGEST = 64 << 20  # bytes; the index of a model of 1,000 files has some 10 million
MOST_LEVELS = 64  # of objects and lists in each other; a config.json has some five
MOST_VALUES = 10_000_000  # in all of its objects and lists; a tokenizer of 260,000 tokens has some 1.5 million
LONGEST_NAME = 1000  # letters of a name in an object; the longest, of tensors and tokens, have some hundred


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises OSError, also for what is no regular file; ValueError, which says what is wrong, where the file is too large,
    has too many values, is no UTF-8, no JSON or no object, has an object that gives a name two values or has one longer
    than any is, or is nested more deeply than any reader of the object should have to go.
    """
    with opened(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    if not content.strip():
        raise ValueError("it is empty")
    return as_object(content)


def as_object(content: bytes) -> dict[str, Any]:
    """The object that a JSON text holds. Raises ValueError as `read_object`."""
    check_amount(content)
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    level: list[Any] = [found]
    for _ in range(MOST_LEVELS):
        within = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in within if isinstance(child, dict | list)]
    if level:
        raise _too_deep()
    return found


def check_amount(content: bytes) -> None:
    """Raise ValueError where a JSON text may hold far more values than any file of ours: one in a list of `{}` has two
    bytes there and a hundred in memory."""
    if content.count(b",") + content.count(b"[") + content.count(b"{") > MOST_VALUES:  # in front of each stands one
        raise ValueError(f"it has more than {MOST_VALUES:,} values")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. One reader would take the first of two values, another the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if len(name) > LONGEST_NAME:
            raise ValueError(
                f"an object has a name of {len(name):,} letters, {LONGEST_NAME:,} at most: {name[:40]!r}..."
            )
        if name in found and found[name] != value:
            raise ValueError(f"an object gives {name!r} two values")
        found[name] = value
    return found


def _too_deep() -> ValueError:
    return ValueError(f"its objects and lists lie in each other more than {MOST_LEVELS} times")
