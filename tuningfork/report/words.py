"""How reports word what comes from data: shares, lists of rows, and text that may hold anything."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


def headline(report: Mapping[str, Any]) -> str:
    """data_report.json in one line."""
    used, read = report["train"]["used"], report["train"]["rows_read"]
    if used == read:
        return f"All {read:,} {report['unit']} can be trained on"
    return f"{used:,} of {read:,} {report['unit']} can be trained on"


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop; a file's name at its beginning stays as it is."""
    name, colon, _ = text.partition(": ")
    return f"{text if colon and '.' in name else text[:1].upper() + text[1:]}."


def share(value: float) -> str:
    """A share of 1 as a percentage that is never rounded to none or all: 37.7%, <0.1%, >99.9%, 0%, 100%."""
    if value in (0, 1):
        return f"{value:.0%}"
    return "<0.1%" if value < 0.0005 else ">99.9%" if value > 0.9995 else f"{value:.1%}"


def signed(value: int) -> str:
    """A difference: +1,200, −7, 0."""
    return f"{value:+,}".replace("-", "−") if value else "0"


def rows(numbers: Sequence[int], most: int = 5) -> str:
    """Row numbers, the first few of them: ``row 7``, ``rows 3, 17, 20 … 45 more``."""
    listed = ", ".join(f"{number}" for number in numbers[:most])
    more = f" … {len(numbers) - most:,} more" if len(numbers) > most else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {listed}{more}"


def cut(text: str, most: int) -> str:
    """The text, or its beginning and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def visible(text: str, newline: str = "↵") -> str:
    """The text with everything to be seen that a reader would not see, or that would reorder or hide what is around it.

    Line ends become `newline` and tabs ⇥. Other control characters, what only formats (such as a mark that turns the
    writing direction) and what is no character (half a surrogate pair) become their code points: ⟨U+202E⟩.
    """
    return text if text.isprintable() else "".join(_seen(c, newline) for c in text)


def by_reason(dropped_rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """reason -> its rows, of data_report.json's dropped_rows."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in dropped_rows:
        found.setdefault(row["reason"], []).append(row)
    return found


def _seen(character: str, newline: str) -> str:
    if character in "\n\t":
        return newline if character == "\n" else "⇥"
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
    return f"⟨U+{ord(character):04X}⟩" if hidden else character
