"""The account of what is read: each row is used, whole or in pieces, or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tuningfork.records import Source
from tuningfork.wording import counted


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """A row that is not trained on, and why. `reason` is one of a few short phrases; `detail` says more."""

    file: str
    row: int
    reason: str
    detail: str = ""
    piece: int = 0  # of the row, where the others may be trained on; see Source


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of an example: of its prompt and of each answer. `opening` of the prompt's are a BOS that no cut takes."""

    prompt: int
    answers: tuple[int, ...]
    opening: int = 0


@dataclass(slots=True)
class DataReport:
    """What became of every row of a file set: rows_read - cut - joined + pieces = used + the sum of dropped."""

    rows_read: int = 0
    cut: int = 0  # rows that were cut into pieces
    joined: int = 0  # rows that were joined into streams, which were cut into pieces
    pieces: int = 0  # that came of these, each an example
    used: int = 0  # examples
    dropped_rows: list[DroppedRow] = field(default_factory=list)
    sources: dict[str, list[str]] = field(default_factory=dict)  # source, as the recipe names it -> its files
    passed_over: list[str] = field(default_factory=list)  # files and splits beside them that are for another use
    formats: dict[str, str] = field(default_factory=dict)  # file -> its format, a name of data/examples/formats.py
    rows_of: dict[str, int] = field(default_factory=dict)  # file -> rows read of it
    fields: dict[str, None] = field(default_factory=dict)  # that rows have, by the files' own names
    sizes: dict[Source, Size] = field(default_factory=dict)  # of examples that were cut, or left out though readable
    notes: dict[str, list[Source]] = field(default_factory=dict)  # what is worth knowing of rows that are used -> which

    @property
    def dropped(self) -> dict[str, int]:
        """reason -> count, the most frequent first."""
        return dict(Counter(row.reason for row in self.dropped_rows).most_common())

    @property
    def files(self) -> list[str]:
        """Of all sources, in their order."""
        return [file for files in self.sources.values() for file in files]

    def in_order(self, rows: Iterable[Source]) -> list[Source]:
        """Rows, each once, as the files and they in these lie."""
        place = {file: i for i, file in enumerate(self.files)}
        return sorted({*rows}, key=lambda row: (place[row.file], row.row))


class Pieces(Protocol):
    """What an account says of rows in pieces; see DataReport."""

    @property
    def cut(self) -> int: ...

    @property
    def joined(self) -> int: ...

    @property
    def pieces(self) -> int: ...


def in_pieces(account: Pieces) -> str:
    """What became of rows that are in pieces, as a part of a sentence; empty where none are."""
    pieces = counted(account.pieces, "piece")
    if account.joined:
        return f"{account.joined:,} of them joined into a stream of {pieces}, "
    return f"{account.cut:,} of them cut into {pieces}, " if account.pieces else ""
