"""The gated short convolution as a mixer: what it asks for, what it costs, what must be tried of it."""

from __future__ import annotations

import pytest

from tests.tiny import one_pack, random_examples, tiny_policy
from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.models.mixers.short_conv import ShortConv, ShortConvLayer
from tuningfork.records import Span

LAYER = ShortConvLayer(channels=2048, taps=3)


def test_it_asks_for_a_kernel_that_takes_its_widest_convolution() -> None:
    assert ShortConv((LAYER, ShortConvLayer(8, 4))).ops == {"causal_conv": {"width": 4}}


def test_a_pack_is_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, calls = PlainCausalConv.prepare, []
    monkeypatch.setattr(PlainCausalConv, "prepare", lambda layout: calls.append(layout) or prepare(layout))
    batch = one_pack(random_examples([(3, (4, 5))]), "prompt")
    tiny_policy("lfm2").hidden_rows(batch)
    assert len(calls) == 1 and calls[0] is batch.layout


def test_a_row_costs_two_flops_a_channel_and_tap() -> None:
    forward = 10 * 2 * 3 * 2048
    spans = [Span(0, 7), Span(7, 3)]
    assert ShortConv((LAYER,)).cost(spans) == (forward, 2 * forward)
    assert ShortConv((LAYER, LAYER._replace(backward=False))).cost(spans) == (2 * forward, 2 * forward)


@pytest.mark.parametrize("limit", [2, 3, 4, 8, 640])
def test_what_must_be_tried_is_longer_and_shorter_than_a_row_reads_as_far_as_it_may(limit: int) -> None:
    mixer = ShortConv((LAYER,))
    shapes = mixer.probes(limit)
    longest = max(prompt + max(answers) for prompt, answers in shapes)
    assert longest <= limit and all(prompt and all(answers) for prompt, answers in shapes)
    assert (mixer.untried(longest) is None) == (longest >= 3)
    if limit >= 8:
        assert {1, 2} < {prompt for prompt, _ in shapes} and max(prompt for prompt, _ in shapes) > 3
