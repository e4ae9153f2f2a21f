"""What other trainers call settings and their values, for messages about unknown ones. The table is hints.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("hints.yaml")
SAME, FILES = "same", "files"
BATCH, ACCUMULATION, WHOLE = "batch", "accumulation", "whole"
UNSUPPORTED = "not supported"
"""What is said begins with this where there is nothing here that does the same."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What to do instead of giving a setting that other trainers have: an entry of the table, which says more."""

    names: str
    setting: str = ""
    values: Mapping[str, list[str]] | str = field(default_factory=dict)
    unsupported: Sequence[str] = ()
    answers: Mapping[str, list[str]] = field(default_factory=dict)
    step: str = ""
    words: str = ""

    def instead(self, value: Any, dashes: str, step: Mapping[str, int], choices: Mapping[str, str]) -> str:
        """In words, for the value that was given; `dashes` lead our setting on a command line. `step` has the numbers
        that were given of what makes up a step's batch, `choices` the values that our setting takes, if these are a
        few, and how a recipe has them: one of them is ours under the same name, whatever the table says of it."""
        given = _plain(str(value)) if isinstance(value, str | int | float) else ""  # a truth value is an int
        same = choices.get(given, "")
        if not same and (answer := _first(self.answers, given)):
            return answer
        if not self.setting:
            return self.words
        ours, words = str(value) if given and self.values == SAME else "", self.words
        if self.values == FILES:
            ours = _files(value)
        if isinstance(self.values, Mapping):
            ours = _first(self.values, given) or same
        if self.step in (BATCH, ACCUMULATION) and step.keys() >= {BATCH, ACCUMULATION}:
            ours = "" if WHOLE in step else str(step[BATCH] * step[ACCUMULATION])
            words = f"{step[BATCH]} x {step[ACCUMULATION]} on each device; {words}" if ours else words
        missing = f"{UNSUPPORTED}: {given}; " if given in self.unsupported and not same else ""
        shown = f"{' ' if dashes else ': '}{ours}" if ours else ""
        return f"{missing}here it is {dashes}{self.setting}{shown}" + (f" ({words})" if words else "")

    def of_value(self, given: str) -> str:
        """What to give our setting instead of this value of theirs; empty where that is not known."""
        if answer := _first(self.answers, given):
            return answer
        if given in self.unsupported:
            return UNSUPPORTED
        ours = _first(self.values, given) if isinstance(self.values, Mapping) else ""
        return f"here it is {ours}" if ours else ""


def _files(value: Any) -> str:
    """The files that a value names, as ours would: a path, or a list of paths or of mappings with a path each. Empty
    where one may be the name of something else, such as of a data set of the hub."""
    entries = value if isinstance(value, list) else [value]
    paths = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in entries]
    known = [path for path in paths if isinstance(path, str) and (path[:1] in "./~" or "." in path.rpartition("/")[2])]
    if not known or len(known) < len(paths):
        return ""
    return known[0] if len(known) == 1 else f"[{', '.join(known)}]"


def _first(ours: Mapping[str, list[str]], given: str) -> str:
    return next((said for said, theirs in ours.items() if given and given in theirs), "")


@cache
def all_hints() -> dict[str, Hint]:
    """Name elsewhere -> what to do here."""
    hints = [Hint(**entry) for entry in yaml.safe_load(TABLE.read_text(encoding="utf-8"))]
    return {name: hint for hint in hints for name in hint.names.split()}


def hint(
    key: str,
    value: Any = None,
    dashes: str = "",
    beside: Mapping[str, Any] | None = None,
    choices: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """What to do instead of giving the setting `key`, as a sentence; empty where no other trainer is known to have it.

    `key` may stand in a section. One that is no section of ours but a name of theirs is meant as a whole. `beside` are
    all keys that are given, with their values; `choices` has the values of each setting of ours that takes but a few,
    and how a recipe has them.
    """
    section, _, name = key.rpartition(".")
    known = all_hints()
    whole = known.get(_plain(section))
    found = whole or known.get(_plain(name))
    if found is None:
        return ""
    said, given = (section, None) if whole else (key, value)
    instead = found.instead(given, dashes, _step(beside or {}), (choices or {}).get(found.setting, {}))
    return f"{dashes}{said} is not a setting; {instead}."


def value_hint(setting: str, value: Any) -> str:
    """What stands here for another trainer's value of our `setting`; empty where that is not known."""
    given = _plain(value) if isinstance(value, str) else ""
    of_setting = (entry for entry in all_hints().values() if entry.setting == setting)
    return next(filter(None, (entry.of_value(given) for entry in of_setting)), "")


def _step(given: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of what makes up the batch of a step, by what they are."""
    known = all_hints()
    found = {known[name].step: value for key, value in given.items() if (name := _leaf(key)) in known}
    return {part: value for part, value in found.items() if part and type(value) is int}


def _leaf(key: str) -> str:
    return _plain(key.rpartition(".")[2])


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
