"""Token examples in flat columns: in memory, or mapped from files, so that a table may be larger than memory.

The columns of a table with N examples, A answers and L tokens, each of them one file of plain numbers:

    row      int64 [N]    where the example stands in its file, from 1
    piece    int32 [N]    which piece of its row it is, from 1; 0 where it is the whole row; of a stream of rows, which
                          begins at `row`
    answers  int32 [N]    how many answers it has
    prompt   int32 [N]    tokens of its prompt
    label    int8 [N]     of a row without a partner: 1 wanted, 0 not; -1 where there is no label
    weight   float64 [N]  of its loss
    margin   float64 [N]  by which the first answer should win; NaN where there is none
    group    uint64 [N]   names what it is put into for its order (train.group_by); 0 where there is nothing to say
    content  bytes16 [N]  the hash of its tokens and of which count, see records.content_digest
    answer   int32 [A]    tokens of each answer
    text     int64 [A]    bytes of the text that an answer's targets stand for, see records.TokenAnswer
    ids      int32 [L]    token ids: of each example the prompt, then its answers
    counts   bool [L]     whether the token's log-prob counts; false for prompts
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import overload

import numpy as np

from tuningfork.files import opened
from tuningfork.records import Source, TokenAnswer, TokenExample, column, prompt_hash

Columns = Mapping[str, np.ndarray]

TYPES: dict[str, np.dtype] = {
    **dict.fromkeys(("row", "text"), np.dtype("<i8")),
    "label": np.dtype("i1"),
    "content": np.dtype("S16"),
    "counts": np.dtype("?"),
    **dict.fromkeys(("piece", "answers", "prompt", "answer", "ids"), np.dtype("<i4")),
    **dict.fromkeys(("weight", "margin"), np.dtype("<f8")),
    "group": np.dtype("<u8"),
}

_OF_TOKENS = ("answer", "text", "ids", "counts")  # columns that have no entry for each example


class TokenTable(Sequence[TokenExample]):
    """The examples of one file, made from its columns as they are asked for; their arrays are views."""

    def __init__(self, file: str, columns: Columns) -> None:
        self.file = file
        self.columns = columns
        self._first_answer = _starts(columns["answers"])
        answers = _starts(columns["answer"])
        self._first_token = _starts(columns["prompt"]) + answers[self._first_answer]

    def __len__(self) -> int:
        return len(self.columns["row"])

    @overload
    def __getitem__(self, place: int) -> TokenExample: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenExample]: ...
    def __getitem__(self, place: int | slice) -> TokenExample | list[TokenExample]:
        if isinstance(place, slice):
            return [self[n] for n in range(*place.indices(len(self)))]
        n = range(len(self))[place]
        get = self.columns
        ids, counts = get["ids"], get["counts"]
        start = int(self._first_token[n])
        stop = start + int(get["prompt"][n])
        prompt, answers = ids[start:stop], []
        own = slice(self._first_answer[n], self._first_answer[n + 1])
        for length, text in zip(get["answer"][own].tolist(), get["text"][own].tolist(), strict=True):
            start, stop = stop, stop + length
            answers.append(TokenAnswer(ids[start:stop], counts[start:stop], text))
        label, margin = int(get["label"][n]), float(get["margin"][n])
        return TokenExample(
            Source(self.file, int(get["row"][n]), int(get["piece"][n])),
            prompt,
            tuple(answers),
            label=None if label < 0 else bool(label),
            weight=float(get["weight"][n]),
            margin=None if margin != margin else margin,
            group=int(get["group"][n]),
        )

    def source_of(self, token: int) -> Source:
        """The row that has a token, by its place in the column of ids."""
        n = int(np.searchsorted(self._first_token, token, side="right")) - 1
        return Source(self.file, int(self.columns["row"][n]))

    def column(self, name: str) -> np.ndarray:
        """What `records.column` says of the examples, without making them."""
        get, first = self.columns, self._first_answer[:-1]
        if name == "longest":
            longest = np.maximum.reduceat(get["answer"], first) if len(self) else get["answer"]
            return get["prompt"].astype(np.int64) + longest
        if name in ("plain_tokens", "unique_tokens"):
            answers = np.diff(_starts(get["answer"])[self._first_answer])
            return get["prompt"].astype(np.int64) * (get["answers"] if name == "plain_tokens" else 1) + answers
        if name == "prompt_hash":
            ids, starts = get["ids"], self._first_token[:-1]
            pieces = zip(starts.tolist(), (starts + get["prompt"]).tolist(), strict=True)
            return np.fromiter((prompt_hash(ids[start:stop]) for start, stop in pieces), "<u8", len(self))
        return get[name]


class Subset(Sequence[TokenExample]):
    """Examples chosen from one sequence after another, in any order, without making them: `places` int64 [n]."""

    def __init__(
        self, parts: Sequence[Sequence[TokenExample]], places: np.ndarray | Sequence[int] | None = None
    ) -> None:
        """All examples of `parts`, or those at `places`, counted through all parts."""
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        whole = int(self._ends[-1]) if parts else 0
        self._places = np.arange(whole) if places is None else np.asarray(places, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> TokenExample: ...
    @overload
    def __getitem__(self, place: slice) -> Subset: ...
    def __getitem__(self, place: int | slice) -> TokenExample | Subset:
        if isinstance(place, slice):
            return Subset(self._parts, self._places[place])
        n = int(self._places[place])
        part = int(np.searchsorted(self._ends, n, side="right"))
        return self._parts[part][n - int(self._ends[part]) + len(self._parts[part])]

    def __iter__(self) -> Iterator[TokenExample]:
        owners = np.searchsorted(self._ends, self._places, side="right")
        starts = self._ends[owners] - np.array([len(part) for part in self._parts], dtype=np.int64)[owners]
        for part, place in zip(owners.tolist(), (self._places - starts).tolist(), strict=True):
            yield self._parts[part][place]

    def column(self, name: str) -> np.ndarray:
        """What `records.column` says of the examples, without making them; of a few, without looking at all others."""
        found = column([], name)
        owners = np.searchsorted(self._ends, self._places, side="right")
        order = np.argsort(owners, kind="stable")
        used, first = np.unique(owners[order], return_index=True)
        for owner, here in zip(used.tolist(), np.split(order, first[1:]), strict=False):
            part = self._parts[owner]
            places = self._places[here] - (self._ends[owner] - len(part))
            of_part = part.take(places).column(name) if isinstance(part, Subset) else column(part, name)[places]
            if not len(found):
                found = np.empty(len(self), of_part.dtype)
            found[here] = of_part
        return found

    def take(self, places: np.ndarray | Sequence[int]) -> Subset:
        """The examples at these places of this selection, in this order."""
        return Subset(self._parts, self._places[np.asarray(places, dtype=np.int64)])


def rows_in(columns: Columns) -> int:
    """Rows that examples come of, each counted once however many pieces it was cut into."""
    return int((columns["piece"] <= 1).sum())


def columns_of(examples: Sequence[TokenExample]) -> Columns:
    """The columns of these examples."""
    answers = [answer for example in examples for answer in example.answers]
    said = {name: column(examples, name) for name in ("answers", "label", "weight", "margin", "group", "content")}
    parts = [part for e in examples for part in ((e.prompt_ids, None), *((a.ids, a.mask) for a in e.answers))]
    found: dict[str, list] = {
        "row": [e.source.row for e in examples],
        "piece": [e.source.piece for e in examples],
        "prompt": [len(e.prompt_ids) for e in examples],
        "answer": [len(answer.ids) for answer in answers],
        "text": [answer.text_bytes for answer in answers],
    }
    flat = {
        "ids": np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in parts)]),
        "counts": np.concatenate(
            [np.zeros(0, bool), *(np.zeros(len(ids), bool) if mask is None else mask for ids, mask in parts)]
        ),
    }
    return {name: np.asarray(value, dtype=TYPES[name]) for name, value in (said | found | flat).items()}


def joined_columns(blocks: Iterable[Columns]) -> Columns:
    """The columns of several blocks of examples, one behind the other, in memory."""
    found = list(blocks)
    return {name: np.concatenate([np.zeros(0, kind), *(b[name] for b in found)]) for name, kind in TYPES.items()}


def write_columns(folder: Path, blocks: Iterable[Columns]) -> None:
    """Append blocks to the column files of an empty folder, one by one as they are drawn."""
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in TYPES}
        for block in blocks:
            for name, file in files.items():
                file.write(np.ascontiguousarray(block[name], dtype=TYPES[name]).data)


def mapped_columns(folder: Path) -> Columns:
    """The columns in a folder, mapped, not read."""
    return {name: _mapped(folder / name, kind) for name, kind in TYPES.items()}


def check_consistent(columns: Columns) -> None:
    """Raise ValueError where columns are not what `columns_of` makes: of unlike lengths, pieces that reach beyond the
    tokens, an example without answers, an answer of which no token counts."""
    answers, prompt, answer = (columns[name] for name in ("answers", "prompt", "answer"))
    if {len(columns[name]) for name in TYPES if name not in _OF_TOKENS} != {len(answers)}:
        raise ValueError("columns of examples have unlike lengths")
    if (answers < 1).any() or (answer < 1).any() or (prompt < 0).any() or (columns["row"] < 1).any():
        raise ValueError("an example has no answers, or none of a length")
    tokens = prompt.sum(dtype=np.int64) + answer.sum(dtype=np.int64)
    if (columns["piece"] < 0).any() or (columns["text"] < 0).any() or len(columns["text"]) != len(answer):
        raise ValueError("a piece or a text is none")
    if answers.sum(dtype=np.int64) != len(answer) or {len(columns["ids"]), len(columns["counts"])} != {tokens}:
        raise ValueError("examples have other answers or tokens than there are")
    counts, weight = columns["counts"].view(np.uint8), columns["weight"]
    if not len(answer):
        return
    if columns["ids"].min() < 0 or counts.max() > 1 or not np.isin(columns["label"], (-1, 0, 1)).all():
        raise ValueError("an id, a label or a mask is none")
    if not (np.isfinite(weight) & (weight > 0)).all():
        raise ValueError("a weight is none")
    # All pieces in their order: in front of an example's answers stands its prompt.
    sizes = np.insert(answer, _starts(answers)[:-1], prompt)
    is_answer = np.insert(np.ones(len(answer), bool), _starts(answers)[:-1], False)[sizes > 0]
    counted = np.add.reduceat(counts, _starts(sizes[sizes > 0])[:-1], dtype=np.int64)
    if ((counted > 0) != is_answer).any():
        raise ValueError("an answer has no token that counts, or a prompt has one")


def _mapped(path: Path, kind: np.dtype) -> np.ndarray:
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size == 0:  # which cannot be mapped
            return np.zeros(0, kind)
        # A plain array over the map: slicing the map's own class costs ten times as much.
        return np.asarray(np.memmap(file, dtype=kind, mode="r"))


def _starts(sizes: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: where each of n consecutive pieces starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
