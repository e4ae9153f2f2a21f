"""Ranks told apart inside a step: what they computed, what they waited for, and which one is slow."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from tuningfork.distributed.pace import SLOW, STEPS, Pace, PaceWatch
from tuningfork.report.run.metrics import OF_RANKS, Interval, RanksResult, StepResult


class _Sleeping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


def test_the_time_between_blocks_is_waiting_and_that_within_them_computing() -> None:
    blocks = [_Sleeping(), _Sleeping(), _Sleeping()]
    pace = Pace(blocks, torch.device("cpu"))
    begun = time.perf_counter()
    for _ in range(2):
        time.sleep(0.05)  # before the first block: of no block
        for block in blocks:
            block(torch.zeros(1))
            time.sleep(0.01)
    whole = time.perf_counter() - begun
    found = pace.take()
    assert 6 * 0.02 <= found.computing <= whole - 2 * 0.05 - 6 * 0.01
    assert 4 * 0.01 <= found.waiting <= whole - 2 * 0.05 - 6 * 0.02
    assert pace.take() == (0, 0)
    blocks[0](torch.zeros(1))
    pace.restart()
    assert pace.take() == (0, 0)


def test_a_rank_that_is_slow_for_long_is_named_once() -> None:
    watch = PaceWatch()
    said = [watch.add([1.0, 1.1, 2.0, 0.9]) for _ in range(3 * STEPS)]
    (found,) = [slow for slow in said if slow is not None]
    assert said.index(found) == STEPS - 1
    assert found.rank == 2 and found.times == pytest.approx(2.0)


def test_of_two_ranks_the_slower_one_is_named() -> None:
    watch = PaceWatch()
    (found,) = [slow for slow in [watch.add([1.5, 1.0]) for _ in range(STEPS)] if slow is not None]
    assert found == (0, 1.5)


def test_a_rank_that_is_slow_in_most_steps_is_named() -> None:
    watch = PaceWatch()
    said = [watch.add([1.0, 3.0 if step % 3 else 1.0, float("nan")]) for step in range(STEPS)]
    assert said[-1] == (1, 3.0)


def test_a_slow_step_now_and_then_is_nobodys_fault() -> None:
    watch = PaceWatch()
    said = [watch.add([1.0, 1.0 if step % 3 else 3.0, 1.2, SLOW * 0.99]) for step in range(4 * STEPS)]
    assert said == [None] * (4 * STEPS)
    assert watch.add([float("nan")] * 4) is None


def _step(number: int, ranks: RanksResult | None) -> StepResult:
    return StepResult(number, 0.1, 1e-3, 1.0, 4, 0.5, 4, 100, 80, 40, 96, 16, 2.0, 0.1, 1e9, ranks=ranks)


def test_a_line_says_how_alike_ranks_were() -> None:
    interval = Interval(None)
    interval.add(_step(1, RanksResult(2, 1.2, 0.1, [1.0, 3.0])))
    interval.add(_step(2, RanksResult(2, 1.0, 0.3, [float("nan"), 3.0])))
    line = interval.take()
    assert {key: line[key] for key in OF_RANKS} == pytest.approx(
        {"ranks": 2, "tokens_per_s_per_rank": 25.0, "imbalance": 1.1, "slowest_pace": 2.0, "gather_wait": 0.2}
    )
    interval.add(_step(3, None))
    assert not OF_RANKS.keys() & interval.take().keys()
