"""Bins to tensors: the fork layout of one pack, exactly as records.ForkLayout describes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tuningfork.records import ForkLayout, PackedBatch, TokenExample

PADDING_ID = 0  # any id of the vocabulary serves: padding rows are computed like others and used by nobody
SEGMENT_QUANTUM = 32  # the table of segments is filled up with empty ones: a compiler takes lengths of 0 and 1 apart


def build_pack(examples: Sequence[TokenExample], rows: int, share_prompt: bool) -> PackedBatch:
    """Lay whole examples side by side into a pack of `rows` rows, the last of them padding. Tensors are on the CPU."""
    laid, examples = _Rows(), tuple(examples)  # made as they are asked for
    for example in examples:
        laid.add(example, share_prompt)
    used_slots = laid.count
    laid.pad(rows, longest=max((example.longest for example in examples), default=1))
    return PackedBatch(
        input_ids=_tensor(laid.ids, torch.int64),
        layout=ForkLayout(
            segments=_table(laid.segments, rows),
            position_of_row=_tensor(laid.positions, torch.int64),
        ),
        logit_rows=_tensor(laid.logit_rows, torch.int64),
        targets=_tensor(laid.targets, torch.int64),
        answer_of_logit_row=_tensor(laid.answer_of_logit_row, torch.int64),
        answer_lengths=[len(rows) for rows in laid.logit_rows],
        examples=examples,
        used_slots=used_slots,
    )


class _Rows:
    """The rows of a pack as they are laid down; each list holds arrays to be joined at the end."""

    def __init__(self) -> None:
        self.count = 0  # rows so far
        self.answer = 0  # answers so far
        self.segments: list[list[int]] = []
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.logit_rows: list[np.ndarray] = []  # this and the next two have one of each answer
        self.targets: list[np.ndarray] = []
        self.answer_of_logit_row: list[np.ndarray] = []

    def add(self, example: TokenExample, share_prompt: bool) -> None:
        p = len(example.prompt_ids)
        prompt = (self.count, self.count)
        prompt_segment: list[int] | None = None
        for i, answer in enumerate(example.answers):
            if p and (i == 0 or not share_prompt):
                prompt_segment = self._lay(example.prompt_ids, first_position=0)
                prompt = (self.count - p, self.count)
            start = self.count
            self._lay(answer.ids, first_position=p, prompt=prompt)
            if prompt_segment is not None:
                prompt_segment[-1] = self.count
            self._predict(answer.ids, answer.mask, start, last_prompt_row=prompt[1] - 1 if p else None)
            self.answer += 1

    def _lay(self, ids: np.ndarray, first_position: int, prompt: tuple[int, int] | None = None) -> list[int]:
        """Lay one segment; returns its entry of the table."""
        start, n = self.count, len(ids)
        self.ids.append(ids)
        self.positions.append(np.arange(first_position, first_position + n))
        self.count += n
        entry = [start, self.count, *(prompt or (start, start)), self.count]
        self.segments.append(entry)
        return entry

    def _predict(self, ids: np.ndarray, mask: np.ndarray, start: int, last_prompt_row: int | None) -> None:
        """Row j-1 of the answer predicts its token j; the last prompt row predicts the first, if there is a prompt."""
        predictors = np.arange(start - 1, start - 1 + len(ids))
        counted = mask.copy()
        if last_prompt_row is not None:
            predictors[:1] = last_prompt_row
        else:
            counted[:1] = False
        self.logit_rows.append(predictors[counted])
        self.targets.append(ids[counted])
        self.answer_of_logit_row.append(np.full(int(counted.sum()), self.answer))

    def pad(self, rows: int, longest: int) -> None:
        """Fill up to `rows` with segments of their own, so that attention writes those rows too.

        None is longer than the pack's longest sequence, so padding is at no position that the model may not know.
        """
        while self.count < rows:
            self._lay(np.full(min(rows - self.count, longest), PADDING_ID), first_position=0)


def _table(segments: list[list[int]], rows: int) -> torch.Tensor:
    empty = [[rows] * 5] * (-len(segments) % SEGMENT_QUANTUM)
    return torch.tensor(segments + empty, dtype=torch.int32)


def _tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(joined).to(dtype)
