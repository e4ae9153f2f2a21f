"""Bins to tensors: the fork layout of one pack, exactly as records.ForkLayout describes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tuningfork.data.pack import Rung
from tuningfork.records import ForkLayout, PackedBatch, TokenExample

PADDING_ID = 0  # any id of the vocabulary serves: padding rows are computed like others and used by nobody


def build(examples: Sequence[TokenExample], rung: Rung, share_prompt: bool) -> PackedBatch:
    """Lay whole examples side by side into a pack of the rung's static shape. All tensors are on the CPU."""
    rows = _Rows()
    for example in examples:
        rows.add(example, share_prompt)
    unique_rows = rows.count
    fork = share_prompt and any(len(example.answers) > 1 for example in examples)
    rows.pad(rung, fork)
    return PackedBatch(
        input_ids=_tensor(rows.ids, torch.int64),
        layout=ForkLayout(
            cu_seqlens_q=_cumulative(rows.query_lengths, rung.segments),
            cu_seqlens_k=_cumulative(rows.key_lengths if fork else rows.query_lengths, rung.segments),
            kv_index=_tensor(rows.keys, torch.int64) if fork else None,
            example_of_row=_tensor(rows.groups, torch.int32),
            answer_of_row=_tensor(rows.answers, torch.int32),
            position_of_row=_tensor(rows.positions, torch.int64),
            max_seqlen=rung.max_seqlen,
        ),
        logit_rows=_tensor(rows.logit_rows, torch.int64),
        targets=_tensor(rows.targets, torch.int64),
        answer_of_logit_row=_tensor(rows.answer_of_logit_row, torch.int64),
        examples=tuple(examples),
        unique_rows=unique_rows,
    )


class _Rows:
    """The rows of a pack as they are laid down; each list holds arrays to be joined at the end."""

    def __init__(self) -> None:
        self.count = 0  # rows so far
        self.group = 0  # examples so far; without sharing, sequences so far
        self.answer = 0  # answers so far
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.groups: list[np.ndarray] = []
        self.answers: list[np.ndarray] = []
        self.keys: list[np.ndarray] = []
        self.query_lengths: list[int] = []
        self.key_lengths: list[int] = []
        self.logit_rows: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.answer_of_logit_row: list[np.ndarray] = []

    def add(self, example: TokenExample, share_prompt: bool) -> None:
        p = len(example.prompt_ids)
        prompt_start = self.count
        for i, answer in enumerate(example.answers):
            a = len(answer.ids)
            with_prompt = i == 0 or not share_prompt
            if with_prompt:
                prompt_start = self.count
                self.group += 1
                self._lay(example.prompt_ids, first_position=0, answer=-1)
            start = self.count
            self._lay(answer.ids, first_position=p, answer=i)
            self.query_lengths.append(p + a if with_prompt else a)
            self.key_lengths.append(p + a)
            self.keys += [np.arange(prompt_start, prompt_start + p), np.arange(start, start + a)]
            self._predict(answer.ids, answer.mask, start, last_prompt_row=prompt_start + p - 1 if p else None)
            self.answer += 1

    def _lay(self, ids: np.ndarray, first_position: int, answer: int) -> None:
        n = len(ids)
        self.ids.append(ids)
        self.positions.append(np.arange(first_position, first_position + n))
        self.groups.append(np.full(n, self.group))
        self.answers.append(np.full(n, answer))
        self.count += n

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

    def pad(self, rung: Rung, fork: bool) -> None:
        """Fill up to the rung's rows and keys, in segments no longer than the rung allows."""
        first_pad_row = self.count
        keys = sum(self.key_lengths)
        for i, n in enumerate(_pieces(rung.tokens - self.count, rung.max_seqlen)):
            self.group = -1 - i
            self.keys.append(np.arange(self.count, self.count + n))
            self._lay(np.full(n, PADDING_ID), first_position=0, answer=-1)
            self.query_lengths.append(n)
            self.key_lengths.append(n)
        if fork:
            # Keys that no query reads. They gather a padding row: the gradient that lands there is nobody's.
            spare = rung.keys - keys - (rung.tokens - first_pad_row)
            self.keys.append(np.full(spare, first_pad_row))
            for n in _pieces(spare, rung.max_seqlen):
                self.query_lengths.append(0)
                self.key_lengths.append(n)


def _pieces(total: int, largest: int) -> list[int]:
    return [largest] * (total // largest) + ([total % largest] if total % largest else [])


def _cumulative(lengths: list[int], segments: int) -> torch.Tensor:
    """Segment borders, int32 [S+1]; unused segments at the end are empty."""
    cumulative = np.zeros(segments + 1, dtype=np.int32)
    cumulative[1 : len(lengths) + 1] = np.cumsum(lengths)
    cumulative[len(lengths) + 1 :] = cumulative[len(lengths)]
    return torch.from_numpy(cumulative)


def _tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(joined).to(dtype)
