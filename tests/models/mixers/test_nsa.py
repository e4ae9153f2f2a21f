"""Native sparse attention as a mixer: what it asks for, what it costs, what must be tried of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.tiny import one_pack, random_examples, tiny_policy
from tuningfork.kernels.nsa.plain import Choice, Grid, PlainNsa
from tuningfork.models.mixers.nsa import NOTES, Nsa, NsaLayer
from tuningfork.records import Span
from tuningfork.report.run.metrics import OF_NSA

PAPER = NsaLayer(64, 192, 128, Grid(32, 16, 64), Choice(16, 1, 2), window=512)
SMALL = NsaLayer(3, 6, 4, Grid(8, 4, 16), Choice(3, 1, 1), window=9, compression=100)


def test_it_asks_for_a_kernel_by_the_widths_of_its_heads() -> None:
    assert Nsa((PAPER,)).ops == {"nsa": {"key_width": 192, "value_width": 128}}


def test_a_pack_is_prepared_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, calls = PlainNsa.prepare, []
    monkeypatch.setattr(PlainNsa, "prepare", lambda layout, grid: calls.append(layout) or prepare(layout, grid))
    batch = one_pack(random_examples([(3, (4, 5))]), "prompt")
    tiny_policy("nsa_mean").hidden_rows(batch)
    assert len(calls) == 1 and calls[0] is batch.layout


def by_hand(layer: NsaLayer, above: int, own: int) -> tuple[int, int]:
    """(pairs of a query head, compressed blocks), position by position."""
    (length, stride, select), count = layer.grid, layer.choice.count
    pairs = blocks = 0
    for t in range(above, above + own):
        pairs += sum(i * stride + length <= t + 1 for i in range(t + 1))
        chosen = range(max(0, t // select + 1 - count), t // select + 1)  # as many as any other choice with t's own
        pairs += sum(p // select in chosen for p in range(t + 1))
        blocks += t + 1 >= length and (t + 1 - length) % stride == 0
    return pairs, blocks


@pytest.mark.parametrize("span", [(0, 1), (0, 7), (0, 100), (5, 60), (47, 2), (48, 1), (64, 33)])
def test_flops_are_those_of_a_count_by_hand(span: tuple[int, int]) -> None:
    pairs, blocks = by_hand(SMALL, *span)
    forward = 2 * 3 * (6 + 4) * pairs + 2 * 100 * blocks
    assert Nsa((SMALL,)).cost([Span(*span)]) == (forward, 2 * forward)
    assert Nsa((SMALL, SMALL)).cost([Span(*span), Span(0, 0)]) == (2 * forward, 4 * forward)
    above, own = span
    assert SMALL.keys_read(*span) == pairs + sum(min(t + 1, 9) for t in range(above, above + own))


def test_keys_of_long_documents_are_those_of_the_paper() -> None:
    """Compressed, selected and window's a token at l 32, d 16, l' 64, n 16, w 512, each rounded."""
    a_token = {512: (15, 257, 257), 2048: (63, 753, 448), 8192: (255, 933, 496), 65536: (2047, 985, 510)}
    for n, pairs in a_token.items():
        assert abs(PAPER.keys_read(0, n) / n - sum(pairs)) < 1.5


@pytest.mark.parametrize("limit", [2, 3, 8, 64, 640])
def test_what_must_be_tried_has_rows_that_choose_as_far_as_it_may(limit: int) -> None:
    mixer = Nsa((SMALL,))
    shapes = mixer.probes(limit)
    longest = max(prompt + max(answers) for prompt, answers in shapes)
    assert longest <= limit and all(prompt and all(answers) for prompt, answers in shapes)
    assert (mixer.untried(longest) is None) == (longest > 48)
    if limit == 2:
        assert mixer.untried(longest) == "not a choice of blocks, which begins behind 48 tokens"


def test_what_is_noted_are_the_gates_and_keys_of_its_tokens() -> None:
    """By hand: gates from the rows that go into them, over the tokens of a pack without its padding."""
    policy = tiny_policy("nsa_mean")
    batch = one_pack(random_examples([(70, (5, 40)), (0, (8,))]), "prompt")
    sums: dict[str, float] = dict.fromkeys(NOTES, 0.0)

    def hear(layer: Any, given: Any, out: torch.Tensor) -> None:
        for row in out[: batch.used_slots].sigmoid().view(batch.used_slots, 4, 3):
            for head in row.tolist():
                shares = [gate / sum(head) for gate in head]
                found = [*head, -sum(share * math.log(share) for share in shares)]
                for name, number in zip(NOTES, found, strict=False):
                    sums[name] += number / 4 / 2  # heads, layers

    hooks = [layer.self_attn.gate.register_forward_hook(hear) for layer in policy.blocks]
    policy.hidden_rows(batch)
    assert len(hooks) == 2 and batch.used_slots == 70 + 5 + 40 + 8 < len(batch.input_ids)
    positions = [*range(70), *range(70, 75), *range(70, 110), *range(8)]
    for t in positions:
        sums["nsa/keys_read"] += sum(4 * i + 8 <= t + 1 for i in range(t)) + min(9, t + 1)
        sums["nsa/keys_read"] += t + 1 if t < 64 else 3 * 16 + t % 16 + 1
    assert list(policy.noted) == list(NOTES) == list(OF_NSA)
    for name, total in policy.noted.items():
        assert float(total.detach()) == pytest.approx(sums[name], rel=1e-6), name
    tiny = tiny_policy("llama")
    tiny.hidden_rows(batch)
    assert tiny.noted == {}
