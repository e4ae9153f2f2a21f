"""Trees to tensors: one pack, exactly as records.PackedBatch and records.ForkLayout describe it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tuningfork.data.packing.tree import Forest, Share, grow
from tuningfork.records import GRID, ROOT, ForkLayout, PackedBatch, Segment, Span, TokenExample

PADDING_ID = 0  # any id of the vocabulary serves: padding rows are computed like others and used by nobody
SEGMENT_QUANTUM = 32  # tables are filled up with empty entries: a compiler takes lengths of 0 and 1 apart
STEP_QUANTUM = 256


def build_pack(examples: Sequence[TokenExample], rows: int, share: Share) -> PackedBatch:
    """Lay whole examples into a pack of `rows` rows, the last of them padding. Tensors are on the CPU.

    Args:
        share: how much of them is laid once: see `tree.grow`.
    """
    examples = tuple(examples)  # made as they are asked for
    return lay(examples, grow(examples, share).of(range(len(examples))), rows)


def lay(examples: Sequence[TokenExample], forest: Forest, rows: int) -> PackedBatch:
    """Lay the trees of some examples into a pack of `rows` rows, the last of them padding. Tensors are on the CPU."""
    examples, laid = tuple(examples), _Rows()
    for node in forest.nodes:
        laid.add(node.ids, node.parent)
    spans = [Span(segment.first_position, segment.end - segment.start) for segment in laid.segments]
    logits = _LogitRows(laid)
    for example, leaves in zip(examples, forest.leaves, strict=True):
        logits.add(example, leaves)
    laid.pad(rows, longest=max((example.longest for example in examples), default=GRID))
    columns, groups = logits.columns()
    return PackedBatch(
        input_ids=_tensor(laid.ids, torch.int64),
        layout=laid.layout(rows),
        **columns,
        answer_lengths=logits.lengths,
        groups=groups,
        examples=examples,
        spans=spans,
    )


class _Rows:
    """The rows of a pack as they are laid down, segment after segment."""

    def __init__(self) -> None:
        self.count = 0  # rows so far
        self.segments: list[Segment] = []
        self.ids: list[np.ndarray] = []  # of each segment, as what follows
        self.positions: list[np.ndarray] = []
        self.steps: list[np.ndarray] = []  # of its ancestors
        self.seams: list[np.ndarray] = []
        self._steps = 0  # of all segments so far
        self._open: list[int] = []  # the last segment and its ancestors: what comes next may continue these

    def add(self, ids: np.ndarray, parent: int) -> None:
        """Lay one segment behind all that is there. `parent` is the last one laid, or one of its ancestors."""
        entry, start, end = len(self.segments), self.count, self.count + len(ids)
        while self._open and self._open[-1] != parent:
            self._close(start)
        first_position = 0 if parent == ROOT else self.path_end(parent)
        self.ids.append(ids)
        self.positions.append(np.arange(first_position, first_position + len(ids)))
        self.segments.append(Segment(start, end, parent, first_position, end, self._steps))
        self._step(entry)
        self._open.append(entry)
        self.count = end

    def path_end(self, entry: int) -> int:
        """Rows of the path from the root to the end of a segment."""
        segment = self.segments[entry]
        return segment.first_position + segment.end - segment.start

    def rows_at(self, entry: int, positions: np.ndarray) -> np.ndarray:
        """Where the path that a segment ends has these positions, which rise; int64."""
        rows = np.empty(len(positions), np.int64)
        behind = len(positions)
        while behind:
            segment = self.segments[entry]
            before = int(np.searchsorted(positions[:behind], segment.first_position))
            rows[before:behind] = positions[before:behind] + (segment.start - segment.first_position)
            behind, entry = before, segment.parent
        return rows

    def _step(self, entry: int) -> None:
        """Say in which steps a segment reads its ancestors."""
        segment = self.segments[entry]
        seam = segment.first_position // GRID * GRID
        line = np.full(GRID, segment.start, np.int64)
        steps = np.zeros(0, np.int64)
        if segment.parent != ROOT:
            above = self.segments[segment.parent]
            whole = np.arange(-(-above.first_position // GRID), segment.first_position // GRID)
            own = above.start + GRID * whole - above.first_position  # of the parent's own rows
            steps = np.concatenate([self.steps[segment.parent][: seam // GRID], own])
        if seam < segment.first_position:
            last = segment.first_position + segment.end - segment.start - 1
            line = self.rows_at(entry, np.minimum(np.arange(seam, seam + GRID), last))
            steps = np.append(steps, -1 - entry)
        self.steps.append(steps)
        self._steps += len(steps)
        self.seams.append(line)

    def _close(self, end: int) -> None:
        """Nothing more continues the last open segment."""
        entry = self._open.pop()
        self.segments[entry] = self.segments[entry]._replace(subtree_end=end)

    def pad(self, rows: int, longest: int) -> None:
        """Fill up to `rows` with segments of their own, so that attention writes those rows too.

        None is longer than the pack's longest sequence, so padding is at no position that the model may not know.
        """
        while self.count < rows:
            self.add(np.full(min(rows - self.count, longest), PADDING_ID), ROOT)

    def layout(self, rows: int) -> ForkLayout:
        """The tables, in which all rows are."""
        while self._open:
            self._close(self.count)
        empty = -len(self.segments) % SEGMENT_QUANTUM
        segments = self.segments + [Segment(rows, rows, ROOT, 0, rows, 0)] * empty
        steps = np.concatenate(self.steps) if self.steps else np.zeros(0, np.int64)
        steps = np.pad(steps, (0, (-len(steps)) % STEP_QUANTUM if len(steps) else STEP_QUANTUM))
        seams = np.concatenate([np.reshape(self.seams, (-1, GRID)), np.zeros((empty, GRID), np.int64)])
        return ForkLayout(
            segments=torch.tensor(segments, dtype=torch.int32),
            position_of_row=_tensor(self.positions, torch.int64),
            steps=torch.from_numpy(steps).int(),
            seams=torch.from_numpy(seams).int(),
        )


class _LogitRows:
    """What of each answer counts, and from which rows and tokens its log-prob is read."""

    def __init__(self, laid: _Rows) -> None:
        self._laid = laid
        self.lengths: list[int] = []  # counted tokens of each answer
        self._answers: list[int] = []  # of each example
        self._predictors: list[np.ndarray] = []  # of each answer's counted tokens: the rows before them
        self._targets: list[np.ndarray] = []  # and the tokens

    def add(self, example: TokenExample, leaves: Sequence[int]) -> None:
        """Read an example's answers; `leaves` are the segments with which their sequences end.

        A path's row at position t - 1 predicts its token at t, so the first token of a path has no predictor.
        """
        p = len(example.prompt_ids)
        for answer, leaf in zip(example.answers, leaves, strict=True):
            counted = np.flatnonzero(answer.mask)
            counted = counted[counted + p > 0]
            self._predictors.append(self._laid.rows_at(leaf, counted + p - 1))
            self._targets.append(answer.ids[counted])
            self.lengths.append(len(counted))
        self._answers.append(len(example.answers))

    def columns(self) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
        """The columns of PackedBatch that speak of logit rows and counted tokens, and its groups."""
        rows, targets = (
            np.concatenate(parts or [np.zeros(0, np.int64)]) for parts in (self._predictors, self._targets)
        )
        _, first, which = np.unique((rows << 32) | targets, return_index=True, return_inverse=True)
        order = np.argsort(first)  # as the first of the counted tokens comes that needs it
        place = np.empty(len(first), np.int64)
        place[order] = np.arange(len(first))
        first, logit_row_of_counted = first[order], place[which]
        answers = np.repeat(np.arange(len(self.lengths)), self.lengths)
        columns = {
            "logit_rows": _tensor([rows[first]], torch.int64),
            "targets": _tensor([targets[first]], torch.int64),
            "logit_row_of_counted": _tensor([logit_row_of_counted], torch.int64),
            "answer_of_counted": _tensor([answers], torch.int64),
        }
        return columns, self._groups(logit_row_of_counted)

    def _groups(self, logit_row_of_counted: np.ndarray) -> list[tuple[int, int]]:
        """Answers and logit rows of each group of examples that share logit rows with no other."""
        counted = np.cumsum([0, *self.lengths])
        ends = np.cumsum(self._answers)  # of each example, in answers
        # How many logit rows the counted tokens before each place need, and the first that it and those behind need.
        most = np.maximum.accumulate(np.concatenate([[-1], logit_row_of_counted])) + 1
        least = np.minimum.accumulate(np.concatenate([logit_row_of_counted, [most[-1]]])[::-1])[::-1]
        clean = [int(end) for end in ends if most[counted[end]] <= least[counted[end]]]
        rows = [int(most[counted[end]]) for end in clean]
        return [
            (end - before, own - fewer)
            for before, end, fewer, own in zip([0, *clean], clean, [0, *rows], rows, strict=False)
        ]


def _tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(joined).to(dtype)
