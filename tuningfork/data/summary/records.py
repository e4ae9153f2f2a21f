"""What is counted of preference data, as records: the one tree that terminal, page and data_report.json show.

A row is its file and its number there, from 1; lengths are tokens; shares are of 1. data_report.json has the fields in
their order here. This module and layouts.py hold records alone, so that a report can import them without what counts
them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tuningfork.accounts import DroppedRow
from tuningfork.data.summary.layouts import Cost, Layout
from tuningfork.records import Source

REFUSED = ("refused", "positions")
"""Kinds of finding at which training does not start."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth knowing of rows in use: how many, and the first of them."""

    count: int
    rows: list[Source]


@dataclass(frozen=True, slots=True)
class ControlWords:
    """Rows in use whose own words spell control tokens: how many, the first of them, which tokens where in how many
    rows, and how many of the rows look as if they had been rendered before."""

    count: int
    rows: list[Source]
    written: dict[str, int]
    rendered: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """A number that rows give, such as a weight: how many give one, and what it is."""

    rows: int
    min: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class TableSummary:
    """One file, saved data set or hub name. rows_read = used + dropped + left_out."""

    file: str
    form: str
    source: str  # the entry of the recipe that stands for it
    rows_read: int
    used: int
    dropped: int
    left_out: int  # on purpose: by the mix, or by a weight of 0
    used_share: float  # of the rows that are used of all tables
    tokens: int  # of the used rows, the prompt once per answer
    tokens_share: float


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows of one data set that repeat or contradict each other. Groups hold them in the order of the data."""

    distinct_prompts: int
    duplicate_rows: int  # rows that say again what an earlier row says
    duplicates: list[list[Source]]  # groups of rows with the same prompt and the same answers in the same order
    conflicting_rows: int
    conflicts: list[list[list[Source]]]  # groups of rows with the same prompt and answers, parted by their preference


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A held-out row, and the first row of the training data with which it has something in common."""

    eval_row: Source
    train_row: Source


@dataclass(frozen=True, slots=True)
class Leaks:
    """Held-out rows whose prompt is also trained on; and those of them that share an answer to it as well."""

    prompt_rows: int
    prompts: list[SharedRow]
    answer_rows: int
    answers: list[SharedRow]


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts[i] values lie in [i * width, (i + 1) * width), and `beyond` values past the last of these."""

    width: int
    counts: list[int]
    beyond: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Some lengths in tokens. Percentiles lie between two lengths by linear interpolation, as numpy's do."""

    total: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: int
    histogram: Histogram


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Which answer of a pair is the longer one; differences are tokens of chosen - tokens of rejected.

    An example of more answers makes a pair of its first with each of the others.
    """

    longer: int  # pairs whose chosen answer is longer
    equal: int
    shorter: int
    longer_share: float
    median: float
    mean: float
    longer_by: Histogram  # of difference - 1, so that its first bar begins with a difference of 1
    shorter_by: Histogram  # of -difference - 1; the same width as longer_by


@dataclass(frozen=True, slots=True)
class Truncation:
    """What a value of data.max_length costs with the recipe's data.over_length.

    An example with a longer sequence is cut, or lost as a whole: where nothing is to be cut, and where cutting would
    leave no answer or no prompt.
    """

    max_length: int
    recipe: bool  # it is the recipe's
    rows_cut: int
    rows_cut_share: float
    rows_lost: int
    rows_lost_share: float
    tokens_lost: int  # of both, the prompt once per answer
    tokens_lost_share: float


@dataclass(frozen=True, slots=True)
class SetSummary:
    """One data set. Repeats, lengths and bias are those of the rows in use, lengths and bias before any row is cut.

    Truncation is of all rows that could be used if they were shorter, those that the mix leaves out among them.
    """

    name: str  # of its only file, or what it is for
    tables: list[TableSummary]
    passed_over: list[str]  # files and splits beside them that are for another use
    rows_read: int
    used: int
    dropped: dict[str, int]  # reason -> rows, the most frequent first
    left_out: dict[str, int]  # reason -> rows that are left out on purpose
    dropped_rows: list[DroppedRow]  # not those left out on purpose
    notes: dict[str, Note]
    weights: Numbers | None  # of the rows in use whose weight is not 1
    margins: Numbers | None  # of the rows in use that have one
    identical_answers: int  # of the dropped rows
    empty_answers: int
    repeats: Repeats
    rows_used: int  # each once, however many examples came of it
    cut: int  # of these, those that are shorter than their file has them, or in pieces, by data.over_length
    joined: int  # of these, those that were joined into streams, which are in pieces
    pieces: int  # that came of rows which were cut into some, or joined
    lengths: dict[str, Lengths]  # of prompt, chosen, rejected, answer and sequence, as there are
    length_bias: LengthBias | None  # of examples with several answers
    truncation: list[Truncation]
    refused: dict[str, Note]  # what rows in use have that the objective cannot train on
    control_words: ControlWords | None  # None where there are none, or where data.control_tokens says what they are
    over_positions: list[Source]  # rows in use with a sequence longer than the model knows positions

    @property
    def compares(self) -> bool:
        """Whether rows have answers that are compared with each other."""
        return bool(self.length_bias is not None or self.identical_answers or self.repeats.conflicting_rows)


@dataclass(frozen=True, slots=True)
class MixPart:
    """One source of a mix."""

    source: str
    asked: float  # its entry of data.shares, or of data.counts
    usable: int  # rows
    used: int
    used_share: float  # of the rows that are used of all sources


@dataclass(frozen=True, slots=True)
class Mix:
    """How a recipe mixes its sources: by "shares" or by "counts"."""

    by: str
    parts: list[MixPart]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the recipe's run will do. Packs are counted by packing its first `steps_packed` steps, all of them if they
    are not very many, and then its numbers are those that training finds."""

    examples: int
    order: str  # in words: shuffled, or by what they are grouped
    examples_per_step: int  # their mean, rounded, where steps go by tokens
    by_tokens: bool
    steps_per_epoch: float
    epochs: float  # of the whole run
    steps: int
    packs_per_step: float
    packs_per_epoch: int
    packs: int
    steps_packed: int
    pad_share: float
    tokens: int  # of the run, the prompt once per answer
    slots: int  # of the run, padding included


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token with a task of its own."""

    text: str
    id: int


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer beside the model, and how the training file's `sequences`, one per answer, begin and end."""

    name: str
    kind: str
    tokens: int
    highest_id: int
    model_rows: int  # of the model's embedding
    model_positions: int | None
    bos: SpecialToken | None
    eos: SpecialToken | None
    pad: SpecialToken | None
    template: str  # chat or none
    date: str | None  # that the template prints; None where it prints none
    sequences: int
    begin_with_bos: int
    begin_with_two_bos: int
    end_with_eos: int
    cut_before_eos: int  # end in the middle of a document, which goes on in its next piece


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and its text; or the few tokens that make up one character together."""

    ids: list[int]
    text: str
    counted: bool  # its log-prob counts in the loss
    special: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A prompt or an answer. Of a long one only `head` and `tail` are kept, without `hidden` tokens between them."""

    name: str  # prompt, chosen or rejected; answer, or answer 2 and so on where there are one or many
    tokens: int
    counted: int
    head: list[Piece]
    hidden: int
    tail: list[Piece]


@dataclass(frozen=True, slots=True)
class ShownExample:
    """One example, and why it was picked: "first", "median length" or "longest"."""

    title: str
    file: str
    row: int
    prompt: Part
    answers: list[Part]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to look at in the data set called `name`. `rows` show it: the first few of them.

    kind: refused, dropped, duplicates, conflicts, leaks, control_tokens, json_text, positions, two_bos (strict);
    length, no_eos, history (worth a look).
    """

    kind: str
    strict: bool
    text: str
    count: int
    name: str
    rows: list[Source]

    @property
    def refuses(self) -> bool:
        """Whether training would not start."""
        return self.kind in REFUSED


@dataclass(frozen=True, slots=True)
class DataSummary:
    """Everything that is counted of a recipe's data.

    `eval` and `leaks` are None where the recipe names no data.eval; cost is of the training data.
    """

    unit: str  # what a row is: a "pair", or an "example" of any number of answers
    findings: list[Finding]
    max_length: int
    over_length: str  # what becomes of longer rows
    pack_tokens: int
    share: str  # what of a pack is laid once: none, prompt or tree
    mix: Mix | None
    train: SetSummary
    eval: SetSummary | None
    leaks: Leaks | None
    cost: Cost
    run: RunPlan
    counted_for: str  # the device whose packs are counted
    tokenizer: TokenizerFacts
    shown: list[ShownExample]

    @property
    def layout(self) -> Layout:
        """The one of the recipe's pack.share."""
        return self.cost.layout({"none": "packed", "prompt": "shared", "tree": "trees"}[self.share])

    @property
    def refused(self) -> list[Finding]:
        """The findings at which training would not start."""
        return [finding for finding in self.findings if finding.refuses]

    @property
    def strict(self) -> list[Finding]:
        """The findings that `--strict` stops on."""
        return [finding for finding in self.findings if finding.strict]

    def as_dict(self) -> dict[str, Any]:
        """The tree in JSON's types, as data_report.json holds it."""
        return asdict(self)
