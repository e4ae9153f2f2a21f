"""A model with a recurrence whose packed examples see each other does not start, and the op that lets them is named."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import HYBRIDS, SHORT_CONVS, tiny_model, tiny_policy
from tuningfork.errors import ModelError
from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.models.hf import gated_delta, short_conv
from tuningfork.models.hf.layers import class_of
from tuningfork.train.checks.self_check import check_packed_equals_alone, probes, untried


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*HYBRIDS, *SHORT_CONVS])
def test_a_model_passes_and_is_left_as_it_was(family, dtype) -> None:
    model = tiny_model(family, dtype)
    before = [weight.clone() for weight in model.parameters()]
    check_packed_equals_alone(model, "here")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(
        type(layer) is not class_of(layer) and not layer._forward_hooks
        for layer in gated_delta.layers(model) or short_conv.layers(model)
    )


def test_examples_cross_chunks_and_what_a_convolution_reads() -> None:
    policy = tiny_policy("olmo_hybrid")
    shapes = {(len(e.prompt_ids), tuple(len(a.ids) for a in e.answers)) for e in probes(policy)}
    assert {(70, (3, 61)), (1, (2, 130)), (64, (64, 1))} <= shapes
    assert untried(policy) == []


def leaking_conv(monkeypatch) -> None:
    """Rows read those before them in the pack, whatever these are."""

    def previous(layout):
        rows = len(layout.position_of_row)
        return PlainCausalConv(torch.tensor([rows, *range(rows - 1), rows]))

    monkeypatch.setattr(PlainCausalConv, "prepare", previous)


def leaking_scan(monkeypatch) -> None:
    """A state is carried from each row into the next of the pack: a little of every value is in the results behind."""
    scan = PlainGatedDelta.scan

    def leaking(self, query, key, value, decay, beta):
        before = torch.cat([torch.zeros_like(value[:1]), value.cumsum(0)[:-1]])
        return scan(self, query, key, value, decay, beta) + 0.1 * before

    monkeypatch.setattr(PlainGatedDelta, "scan", leaking)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (leaking_conv, r"its convolution \(causal_conv\) reads tokens of other examples"),
        (leaking_scan, r"its scan \(gated_delta\) carries state from one example into another"),
    ],
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_leak_is_named(family, plant, words, monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(
        ModelError, match=rf"^here: .* gives packed examples other .* Of its layers with a state {words}"
    ):
        check_packed_equals_alone(tiny_model(family, torch.float32), "here")


@pytest.mark.parametrize("family", SHORT_CONVS)
def test_a_leak_of_a_convolution_without_a_scan_is_named(family, monkeypatch) -> None:
    leaking_conv(monkeypatch)
    with pytest.raises(
        ModelError, match=r"with a state its convolution \(causal_conv\) reads tokens of other examples"
    ):
        check_packed_equals_alone(tiny_model(family, torch.float32), "here")


def test_a_leak_that_no_logit_shows_is_found_in_its_layer(monkeypatch) -> None:
    leaking_conv(monkeypatch)
    model = tiny_model("olmo_hybrid", torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name:  # the residual stream drowns what layers add to it
                weight.mul_(1e5)
    with pytest.raises(
        ModelError, match=r"^here: the first OlmoHybridGatedDeltaNet gives packed examples other numbers"
    ):
        check_packed_equals_alone(model, "here")


def test_what_is_wrong_alone_too_is_no_leak(monkeypatch) -> None:
    scan = PlainGatedDelta.scan
    monkeypatch.setattr(PlainGatedDelta, "scan", lambda self, *given: 0.5 * scan(self, *given))
    with pytest.raises(ModelError, match="gives packed examples other log-probs") as caught:
        check_packed_equals_alone(tiny_model("qwen3_next", torch.float32), "here")
    assert "Of its layers with a state" not in str(caught.value)
