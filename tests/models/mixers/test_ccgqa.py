"""What CCGQA does before its attention, as a mixer: what it asks for, what it costs, what must be tried of it."""

from __future__ import annotations

import pytest

from tests.tiny import one_pack, random_examples, tiny_policy
from tuningfork.kernels.ccgqa.plain import PlainCcgqa, QueryHeads
from tuningfork.models.mixers.ccgqa import Ccgqa, CcgqaLayer
from tuningfork.records import Span

LAYER = CcgqaLayer(QueryHeads(8, 2, 64), depthwise=2, grouped=3)


def test_it_asks_for_a_kernel_that_takes_its_widest_convolutions() -> None:
    other = CcgqaLayer(QueryHeads(1, 1, 128), 4, 1)
    assert Ccgqa((LAYER, other)).ops == {"ccgqa": {"head_width": 128, "depthwise": 4, "grouped": 3}}


def test_a_pack_is_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    whole = PlainCcgqa.prepare

    def count(layout):
        made.append(layout)
        return whole(layout)

    monkeypatch.setattr(PlainCcgqa, "prepare", count)
    policy = tiny_policy("ccgqa")
    policy.hidden_rows(one_pack(random_examples([(3, (2, 2))]), "prompt", 64))
    assert len(made) == 1


def test_it_costs_its_convolutions_for_each_row() -> None:
    """640 channels: 2 multiply-adds by channel, and 3 for each of the 64 of a head."""
    row = 2 * 640 * (2 + 3 * 64)
    assert Ccgqa((LAYER, LAYER)).cost([Span(5, 10), Span(0, 1)]) == (11 * 2 * row, 2 * 11 * 2 * row)
    assert Ccgqa((LAYER._replace(backward=False),)).cost([Span(0, 1)]) == (row, 0)


def test_examples_reach_over_what_a_row_depends_on() -> None:
    mixer = Ccgqa((LAYER,))
    assert max(prompt for prompt, _ in mixer.probes(64)) > LAYER.reach == 4
    assert all(p + a <= 3 for p, answers in mixer.probes(3) for a in answers)
    assert mixer.untried(3) == "not all of the 4 tokens that two convolutions read"
    assert mixer.untried(4) is None
