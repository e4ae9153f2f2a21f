"""What other trainers call a setting, for the message about an unknown one. The table is hints.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("hints.yaml")
SAME = "same"


@dataclass(frozen=True, slots=True)
class Hint:
    """What to do instead of giving a setting that other trainers have: an entry of the table, which says more."""

    names: str
    setting: str = ""
    values: Mapping[str, list[str]] | str = field(default_factory=dict)
    answers: Mapping[str, list[str]] = field(default_factory=dict)
    words: str = ""

    def instead(self, value: Any, dashes: str) -> str:
        """In words, for the value that was given; `dashes` lead our setting on a command line."""
        given = str(value).lower() if isinstance(value, str | int | float) else ""  # a truth value is an int
        if answer := _first(self.answers, given):
            return answer
        if not self.setting:
            return self.words
        ours = str(value) if given and self.values == SAME else ""
        if isinstance(self.values, Mapping):
            ours = _first(self.values, given)
        shown = f"{' ' if dashes else ': '}{ours}" if ours else ""
        return f"here it is {dashes}{self.setting}{shown}" + (f" ({self.words})" if self.words else "")


def _first(ours: Mapping[str, list[str]], given: str) -> str:
    return next((said for said, theirs in ours.items() if given and given in theirs), "")


@cache
def table() -> dict[str, Hint]:
    """Name elsewhere -> what to do here."""
    hints = [Hint(**entry) for entry in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]
    return {name: hint for hint in hints for name in hint.names.split()}


def hint(key: str, value: Any = None, dashes: str = "") -> str:
    """What to do instead of giving the setting `key`, as a sentence; empty where no other trainer is known to have it.

    `key` may stand in a section. One that is no section of ours but a name of theirs is meant as a whole.
    """
    section, _, name = key.rpartition(".")
    known = table()
    whole = known.get(_plain(section))
    found = whole or known.get(_plain(name))
    if found is None:
        return ""
    said, given = (section, None) if whole else (key, value)
    return f"{dashes}{said} is not a setting; {found.instead(given, dashes)}."


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
