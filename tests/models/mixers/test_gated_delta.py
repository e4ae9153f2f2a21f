"""The gated delta rule as a mixer: what it asks for, what it costs, what must be tried of it."""

from __future__ import annotations

import pytest

from tests.tiny import one_pack, random_examples, tiny_policy
from tuningfork.kernels.causal_conv.plain import Heads, PlainCausalConv
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.kernels.select import plain
from tuningfork.models.mixers.gated_delta import CHUNK, GatedDelta, GatedDeltaLayer
from tuningfork.records import Span

OLMO_7B = GatedDeltaLayer(Heads(30, 96, 30, 192), taps=4)


def test_it_asks_for_kernels_that_take_its_widest_heads() -> None:
    layers = (OLMO_7B, GatedDeltaLayer(Heads(16, 128, 32, 128), taps=3))
    assert GatedDelta(layers).ops == {
        "causal_conv": {"width": 4},
        "gated_delta": {"key_width": 128, "value_width": 192},
    }


def test_a_pack_is_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for form in (PlainCausalConv, PlainGatedDelta):
        prepare = form.prepare
        monkeypatch.setattr(
            form, "prepare", lambda layout, form=form, prepare=prepare: calls.append(form) or prepare(layout)
        )
    policy, batch = tiny_policy("olmo_hybrid"), one_pack(random_examples([(3, (4, 5))]), "prompt")
    prepared = policy.mixers[1].prepare(batch.layout, plain())
    assert isinstance(prepared.conv, PlainCausalConv) and isinstance(prepared.scan, PlainGatedDelta)
    calls.clear()
    policy.hidden_rows(batch)
    assert calls == [PlainCausalConv, PlainGatedDelta]


def test_a_row_costs_what_the_chunked_form_multiplies() -> None:
    """By hand, for OLMo-Hybrid-7B: 0.09 million flops of the convolution, 5.98 million of the scan."""
    conv, scan = 8 * (2 * 30 * 96 + 30 * 192), 30 * (6 * 96 * 192 + 64 * (6 * 96 + 4 * 192) + 2 * 64**2 / 3)
    assert OLMO_7B.flops == pytest.approx(conv + scan, rel=1e-4)
    assert OLMO_7B.flops == pytest.approx(6.07e6, rel=1e-2)
    forward = OLMO_7B.flops * 10
    spans = [Span(0, 7), Span(7, 3)]
    assert GatedDelta((OLMO_7B,)).cost(spans) == (forward, 2 * forward)
    assert GatedDelta((OLMO_7B, OLMO_7B._replace(backward=False))).cost(spans) == (2 * forward, 2 * forward)


@pytest.mark.parametrize("limit", [2, 8, 40, 64, 140, 640])
def test_what_must_be_tried_crosses_chunks_as_far_as_it_may(limit: int) -> None:
    mixer = GatedDelta((OLMO_7B,))
    shapes = mixer.probes(limit)
    longest = max(prompt + max(answers) for prompt, answers in shapes)
    assert longest <= limit and all(prompt and all(answers) for prompt, answers in shapes)
    assert (mixer.untried(longest) is None) == (longest > CHUNK)
    if limit >= 140:
        assert {prompt for prompt, _ in shapes} == {70, 1, 64}
