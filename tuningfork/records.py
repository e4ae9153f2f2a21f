"""The nouns of the house. Rooms talk to each other in these records only.

    preference file -> Example (messages) -> TokenExample (ids) -> bins -> PackedBatch (tensors + fork layout)

One idea carries everything: an *example* is a prompt with k answers. k=1 is a single answer or a plain document (empty
prompt), k=2 is a preference pair (answer 0 is the chosen one), k>2 is a ranking.

In a pack tokens lie in *trees* of segments: what several answers begin with is a segment, and what each of them has
for itself a descendant. Code that computes speaks of segments, parents and ancestors; what of them is a prompt is no
concern of it.

Shape legend, used in names and comments throughout:

    T  token rows of a pack, padding included     R  logit rows: rows and tokens whose log-prob is needed
    S  segments of a pack (padded)                A  answers of a pack, all examples together
    N  examples of a pack                         C  counted tokens of all answers
    k  answers of one example
    D  hidden size        V  vocabulary size      H  attention heads        d  width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import xxhash

if TYPE_CHECKING:  # it takes seconds to import, and processes that only make tokens do without
    import torch
    from torch import Tensor


def same(one: Any, other: Any) -> bool:
    """Whether two values of a file are the same to whoever prints them.

    Python holds 1, 1.0 and True for equal, and two objects whatever the order of their keys. Templates print three
    different things, and the keys in their order, so that conversations which differ in these are not one.
    """
    return repr(one) == repr(other)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, as chat templates take it. Equal messages are printed alike (see `same`)."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other fields that templates print: tool_calls
    counts: bool = field(default=True, compare=False)  # an assistant turn that its file lets count in the loss

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (self.role, self.content) == (other.role, other.content) and same(self.extra, other.extra)


@dataclass(frozen=True, slots=True)
class Source:
    """Where an example was read: a file and its row there, counted from 1, of which it may be a piece."""

    file: str
    row: int
    piece: int = 0  # counted from 1; 0 is the whole row

    def __str__(self) -> str:
        return f"{self.file}:{self.row}" + (f" piece {self.piece}" if self.piece else "")

    @property
    def whole(self) -> Source:
        """The row that it is a piece of."""
        return Source(self.file, self.row)


Turns = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with k answers, before tokenization.

    `prompt` and each answer are both turns of a conversation, or both plain text that is used as it is.
    An answer of several turns counts only its assistant turns in the loss.
    """

    source: Source
    prompt: Turns | str
    answers: tuple[Turns, ...] | tuple[str, ...]
    label: bool | None = None  # of a row without a partner: is its one answer wanted?
    weight: float = 1.0  # of the example's loss
    margin: float | None = None  # by which the first answer should win, in rewards
    template: Mapping[str, Any] = field(default_factory=dict, hash=False)  # arguments of the chat template, tools too
    group: int = 0  # 64 bits that name what train.group_by puts it into; 0 where there is none, or nobody asked

    @property
    def id(self) -> str:
        return str(self.source)


class Span(NamedTuple):
    """Tokens of all ancestors of a segment, and of its own.

    What tokens cost is a sum over segments: each token is computed once, after all that it sees.
    """

    above: int
    own: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenAnswer:
    """One answer's tokens: `ids` int32 [a]; `mask` bool [a], true where the token's log-prob counts.

    `text_bytes` is the UTF-8 length of the text that those tokens stand for which count and have a predictor; 0 where
    nobody has counted it.
    """

    ids: np.ndarray
    mask: np.ndarray
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenExample:
    """An example as token ids. `prompt_ids` int32 [p], p may be 0; its k answers each continue the whole prompt."""

    source: Source
    prompt_ids: np.ndarray
    answers: tuple[TokenAnswer, ...]
    label: bool | None = None  # see Example
    weight: float = 1.0
    margin: float | None = None
    group: int = 0

    @property
    def id(self) -> str:
        return str(self.source)

    @property
    def content(self) -> bytes:
        """The hash of what is scored, see `content_digest`."""
        ids = np.concatenate([self.prompt_ids, *(answer.ids for answer in self.answers)])
        counts = np.concatenate([np.zeros(len(self.prompt_ids), bool), *(answer.mask for answer in self.answers)])
        return content_digest([len(self.prompt_ids), *(len(answer.ids) for answer in self.answers)], ids, counts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: prompt + answer."""
        return len(self.prompt_ids) + max(len(answer.ids) for answer in self.answers)

    @property
    def plain_tokens(self) -> int:
        """Tokens as a plain trainer counts them: the prompt once per answer."""
        return sum(len(self.prompt_ids) + len(a.ids) for a in self.answers)

    @property
    def unique_tokens(self) -> int:
        """Tokens with the prompt counted once: what it takes up in a pack, if it shares nothing with other examples."""
        return sum(own for _, own in self.spans)

    @property
    def spans(self) -> list[Span]:
        """Those of a tree of its own: its prompt, and each of its answers."""
        p = len(self.prompt_ids)
        root = [Span(0, p)] if p else []
        return root + [Span(p, len(answer.ids)) for answer in self.answers]

    def alone(self) -> list[TokenExample]:
        """Each answer as an example of its own, with the whole prompt: how a plain trainer has it."""
        return [replace(self, answers=(answer,)) for answer in self.answers]

    def answer_tokens(self, answer: int) -> int:
        """Tokens of one answer whose log-prob counts. The first token of a document has no predictor, so none."""
        mask = self.answers[answer].mask
        return int(mask.sum()) - (1 if len(self.prompt_ids) == 0 and len(mask) and mask[0] else 0)


def content_digest(lengths: Sequence[int], ids: np.ndarray, counts: np.ndarray) -> bytes:
    """16 bytes that name an example's content: its tokens, where it is cut into prompt and answers, and what counts.

    Args:
        lengths: tokens of the prompt and of each answer; they go first, so that no two cuts of the same ids look alike.
        ids, counts: [sum of lengths], of the prompt, then of its answers; of the prompt nothing counts.
    """
    digest = xxhash.xxh3_128(np.array([len(lengths), *lengths], dtype="<i8").data)
    digest.update(np.ascontiguousarray(ids, dtype="<i4").data)
    digest.update(np.ascontiguousarray(counts, dtype="?").data)
    return digest.digest()


def prompt_hash(ids: np.ndarray) -> int:
    """64 bits that name a prompt, int32 [p]: of millions of prompts two look alike with a chance of one in a million.

    0 where there is none.
    """
    return xxhash.xxh3_64_intdigest(ids.data) if len(ids) else 0


_COLUMNS: dict[str, tuple[str, Callable[[TokenExample], Any]]] = {
    "content": ("S16", lambda e: e.content),
    "piece": ("<i4", lambda e: e.source.piece),
    "answers": ("<i8", lambda e: len(e.answers)),
    "prompt": ("<i4", lambda e: len(e.prompt_ids)),
    "longest": ("<i8", lambda e: e.longest),
    "plain_tokens": ("<i8", lambda e: e.plain_tokens),
    "unique_tokens": ("<i8", lambda e: e.unique_tokens),
    "prompt_hash": ("<u8", lambda e: prompt_hash(e.prompt_ids)),
    "label": ("i1", lambda e: -1 if e.label is None else int(e.label)),
    "weight": ("<f8", lambda e: e.weight),
    "margin": ("<f8", lambda e: np.nan if e.margin is None else e.margin),
    "group": ("<u8", lambda e: e.group),
}


def column(examples: Sequence[TokenExample], name: str) -> np.ndarray:
    """One fact of each of many examples, [n], by the name that TokenExample has for it; `answers` are counted, and so
    are the tokens of a `prompt`.

    A label or margin that is not there is -1 or NaN. A sequence that keeps columns (data/token_table.py) makes no
    example for it: a million of them would take half a minute.
    """
    kept = getattr(examples, "column", None)
    if kept is not None:
        return kept(name)
    kind, of = _COLUMNS[name]
    return np.array([of(example) for example in examples], dtype=kind)


def taken(examples: Sequence[TokenExample], places: np.ndarray) -> Sequence[TokenExample]:
    """The examples at these places, in this order; made later where their sequence makes them as they are asked for."""
    take = getattr(examples, "take", None)
    return [examples[place] for place in places.tolist()] if take is None else take(places)


class PerToken(NamedTuple):
    """A number of some answers that is a mean over their tokens, not over answers: sum of `sums` / sum of `tokens`.

    Bytes of text may stand in the place of tokens.
    """

    sums: Tensor  # float64 [n], over each answer's tokens
    tokens: Tensor  # float64 [n], of each answer


Statistic: TypeAlias = "Tensor | PerToken"
"""A number that is reported as a mean: one value for every item that it is taken over, or sums over tokens."""


ROOT = -1
"""The parent of a segment that has none."""

GRID = 32
"""Positions of a step: a mixer reads a path's rows in steps of so many positions, counted from the path's first."""


class Segment(NamedTuple):
    """One segment of a pack: consecutive rows, and where its relatives lie. See ForkLayout."""

    start: int
    end: int  # one past its last row, as every end here
    parent: int  # the entry of its parent in the table; ROOT if it has none
    first_position: int  # of its first row in the path: how many rows all of its ancestors have
    subtree_end: int  # its descendants' rows lie right behind its own, up to here
    steps_start: int  # where its ancestors' steps begin in ForkLayout.steps: one for each GRID positions, or part of it


@dataclass(frozen=True, slots=True)
class ForkLayout:
    """Which rows of a pack see each other: a forest of segments.

    A *segment* is a run of rows that see themselves causally. Each row sees all rows of its segment's ancestors, too,
    and none besides; these together are its *path*, and a row's position is its place in it. Trees lie depth first, so
    that a segment's descendants, the only other rows that see it, are right behind it. A prompt P of three tokens with
    two answers, A and B, of which B is also what another answer, C, continues:

        P ─┬─ A             row       0  1  2  3  4  5  6  7  8
           └─ B ── C        segment   P  P  P  A  A  B  B  C  C
                            position  0  1  2  3  4  3  4  5  6

                    start  end  parent  first_position  subtree_end
        entry 0, P      0    3    ROOT               0            9
        entry 1, A      3    5       0               3            5
        entry 2, B      5    7       0               3            9
        entry 3, C      7    9       2               5            9

    Without sharing the same answers are three roots. Where a path is cut into segments depends on what else is in the
    pack, and must decide no bit. So a mixer goes along a path in *steps* of GRID positions, which lie where they lie
    whatever the cuts are. `steps` says where a segment's ancestors' rows are, from the root on: step i, of positions
    GRID·i and following, is at ``steps[steps_start + i]``. If that is a row, it is the first of GRID consecutive ones.
    If it is negative, a cut lies within the step, and -1 - it is the line of `seams` that has its rows one by one.
    The last step of the ancestors, where it is not whole, goes on with the segment's own rows; its line has these too,
    and repeats the last where the segment ends before. From the next step on a segment's own rows are consecutive.

    Every row belongs to exactly one segment, padding too: attention leaves rows outside the segments unwritten. Entries
    are in the order of the rows; unused ones at the end are empty.
    """

    segments: Tensor  # int32 [S, 6], a Segment each
    position_of_row: Tensor  # int64 [T]
    steps: Tensor  # int32, rows or lines of `seams`; unused ones at the end are 0
    seams: Tensor  # int32 [S, GRID], the line of each segment whose first position is no multiple of GRID


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One pack: whole examples in T rows, and the few logit rows whose log-probs are needed.

    Row r of `logit_rows` predicts `targets[r]`; no two of these R have both in common. An answer's log-prob is a sum
    over its counted tokens: `logit_row_of_counted` says which of the R each of them is. A row of a path that several
    answers share belongs to all of them.

    Answers are numbered through the pack in order; example n owns `answers_per_example[n]` of them. Counted tokens lie
    in the order of their answers, and logit rows in that of the first counted token that needs them.
    """

    input_ids: Tensor  # int64 [T]
    layout: ForkLayout
    logit_rows: Tensor  # int64 [R]
    targets: Tensor  # int64 [R]
    logit_row_of_counted: Tensor  # int64 [C], a place in `logit_rows`
    answer_of_counted: Tensor  # int64 [C]
    answer_lengths: list[int]  # counted tokens of each of the A answers, C together; on the host, as what follows
    groups: list[tuple[int, int]]  # (answers, logit rows) of examples side by side that share logit rows with no other
    examples: tuple[TokenExample, ...]  # N of them, in pack order
    spans: list[Span]  # of each segment that is no padding

    @property
    def answers_per_example(self) -> list[int]:
        return [len(example.answers) for example in self.examples]

    @property
    def used_slots(self) -> int:
        """Of the T slots, those that are no padding."""
        return sum(own for _, own in self.spans)

    def to(self, device: torch.device) -> PackedBatch:
        """This pack with its tensors on a device; the copy to a GPU may still be under way if they are pinned."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))

    def pinned(self) -> PackedBatch:
        """This pack with its tensors in page-locked memory, from which a GPU copies without blocking the host."""
        return map_tensors(self, lambda tensor: tensor.pin_memory())


ChunkLoss = Callable[[int, int, "Tensor"], "Tensor"]
"""(first answer, last answer + 1, their log-probs) -> the share of a loss that these answers of a pack have.

The head asks for it chunk by chunk, each of whole examples, and differentiates it by the log-probs.
"""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to its raw logits: z -> softcap·tanh(scale·z / softcap), or scale·z without a softcap."""

    scale: float = 1.0
    softcap: float | None = None


Record = TypeVar("Record")


def map_tensors(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    """A copy of a record with every tensor in it changed, those of its layout too."""
    from torch import Tensor

    changed: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]  # records are dataclasses
        value = getattr(record, item.name)
        if isinstance(value, Tensor):
            changed[item.name] = change(value)
        elif isinstance(value, ForkLayout):
            changed[item.name] = map_tensors(value, change)
    return replace(record, **changed)  # type: ignore[type-var]
