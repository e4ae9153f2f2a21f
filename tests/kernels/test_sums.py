"""Sums of the same bits: into answers in fixed point, and by place in one order."""

from __future__ import annotations

import pytest
import torch

from tuningfork.kernels.sums import sum_by_answer, sum_by_place


def test_sum_by_answer_by_hand():
    rows = torch.tensor([-1.0, -2.5, -0.25, -4.0, -8.0])
    sums = sum_by_answer(rows, torch.tensor([0, 2, 0, 2, 3]), 5)
    assert sums.tolist() == [-1.25, 0.0, -6.5, -8.0, 0.0]
    assert sums.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_by_answer_has_the_same_bits_in_any_order(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = -(10 ** (6 * torch.rand(3000, generator=generator, dtype=torch.float64) - 4)).to(dtype)
    answers = torch.randint(7, (3000,), generator=generator)
    reference = sum_by_answer(rows, answers, 7)
    for _ in range(5):
        order = torch.randperm(3000, generator=generator)
        assert torch.equal(sum_by_answer(rows[order], answers[order], 7), reference)
    # And they are the sums: half a fixed-point step a row, plus the one rounding to float64.
    exact = [float(rows[answers == a].double().sum()) for a in range(7)]
    assert reference.tolist() == pytest.approx(exact, rel=1e-14, abs=3000 * 2**-35)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_sum_by_answer_marks_exactly_the_answer_that_is_broken(bad):
    rows = torch.tensor([-1.0, bad, -2.0, bad, -3.0])
    sums = sum_by_answer(rows, torch.tensor([0, 1, 1, 1, 2]), 3)
    assert sums[[0, 2]].tolist() == [-1.0, -3.0]
    assert sums[1].isnan()


def test_sum_by_answer_has_room_for_a_very_long_and_very_unlikely_answer():
    sums = sum_by_answer(torch.full((50_000,), -10_000.0), torch.zeros(50_000, dtype=torch.int64), 1)
    assert sums.tolist() == [-5e8]


@pytest.mark.parametrize("rows", [[-3e8, -3e8], [-1e30]])
def test_sum_by_answer_beyond_its_room_is_not_a_number(rows):
    sums = sum_by_answer(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64), 1)
    assert sums[0].isnan() or sums[0] == pytest.approx(sum(rows), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_by_place_adds_up_one_after_the_other(dtype):
    """A large number, its negative and small ones: what is left tells the order."""
    values = torch.tensor([1e20, 5.0, -1e20, 3.0, 7.0, 2.0, -1e20, 1e20], dtype=dtype)
    places = torch.tensor([0, 2, 0, 0, 0, 3, 3, 3])
    assert sum_by_place(values, places, 5).tolist() == [10, 0, 5, 0, 0]
    assert sum_by_place(values, places, 5).dtype == dtype


def test_sum_by_place_of_rows_and_of_nothing():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert sum_by_place(rows, torch.tensor([1, 0, 1]), 3).tolist() == [[3, 4], [6, 8], [0, 0]]
    assert sum_by_place(rows[:0], torch.zeros(0, dtype=torch.int64), 1).tolist() == [[0, 0]]
