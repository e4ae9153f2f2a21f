"""Attention as a mixer: what it asks for, what it costs, what must be tried of it."""

from __future__ import annotations

import pytest

from tests.tiny import one_pack, random_examples, tiny_policy
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.select import plain
from tuningfork.models.mixers.attention import KEYWORD, Attention, AttentionLayer


def attention(*windows: int | None, head_width: int = 8, backward: bool = True) -> Attention:
    return Attention(tuple(AttentionLayer(32, window, head_width, backward) for window in windows))


def test_it_asks_for_a_kernel_that_takes_its_widest_head() -> None:
    layers = (AttentionLayer(64, None, 16), AttentionLayer(64, None, 48), AttentionLayer(64, 7, 32))
    assert Attention(layers).ops == {"attention": {"head_width": 48}}
    assert tiny_policy("qwen3").ops == {"attention": {"head_width": 16}, "row_logps": {}}


def test_a_pack_is_prepared_once_by_the_chosen_form(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, prepare = [], PlainAttention.prepare
    monkeypatch.setattr(PlainAttention, "prepare", lambda layout: calls.append(layout) or prepare(layout))
    policy, batch = tiny_policy("gemma2"), one_pack(random_examples([(3, (4, 5))]), "prompt")
    assert isinstance(attention(None).prepare(batch.layout, plain()), PlainAttention)
    assert calls == [batch.layout]
    calls.clear()
    policy.hidden_rows(batch)
    assert calls == [batch.layout]  # for four layers


def test_the_backward_pass_costs_twice_the_forward_where_there_is_one() -> None:
    [example] = random_examples([(3, (2,))])  # pairs: 1 + .. + 5, or 1 + 2 + 2 + 2 + 2 in a window of 2
    assert attention(None, 2).cost(example.spans) == (4 * 32 * (15 + 9), 8 * 32 * (15 + 9))
    assert attention(None, 2, backward=False).cost(example.spans) == (4 * 32 * (15 + 9), 0)


@pytest.mark.parametrize("windows", [(None,), (6, 200), (None, 900)])
@pytest.mark.parametrize("limit", [8, 40, 139, 640, 5000])
def test_what_must_be_tried_goes_beyond_tile_and_windows_as_far_as_it_may(
    windows: tuple[int | None, ...], limit: int
) -> None:
    mixer = attention(*windows)
    shapes = mixer.probes(limit)
    longest = max(prompt + max(answers) for prompt, answers in shapes)
    assert longest <= limit and all(prompt and all(answers) for prompt, answers in shapes)
    widest = max(64, *(window or 0 for window in windows))
    if limit >= widest + 64 + 11:
        assert shapes[0][0] > widest and max(shapes[0][1]) > 64
    left = [window for window in windows if window and window >= longest]
    assert mixer.untried(longest) == (
        f"not beyond the layers' window of {min(left)}, which is too long for that" if left else None
    )


def test_its_keyword_is_what_the_interface_of_transformers_takes() -> None:
    assert attention(None).keyword == KEYWORD == "fork"
