"""Lengths: percentiles, histograms, bias and limits, on numbers small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.summary.workbench import sizes
from tests.tiny import random_examples
from tuningfork.data.examples.values import Unusable
from tuningfork.data.summary.lengths import length_bias, lengths, preview_truncation
from tuningfork.data.summary.records import Histogram
from tuningfork.data.tokens.truncate import OverLength, truncate

SHAPES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=60)


def test_lengths_by_hand() -> None:
    some = lengths(sizes(random_examples([(4, (1, 3)), (0, (2, 3)), (8, (3, 9))])))
    assert [some[name].total for name in ("prompt", "chosen", "rejected", "sequence")] == [12, 6, 15, 45]
    # whole sequences: 5, 2, 11 and 7, 3, 17; in order 2 3 5 7 11 17
    sequence = some["sequence"]
    assert (sequence.mean, sequence.p50, sequence.max) == (7.5, 6.0, 17)
    # 95 % of the way along the five gaps is 0.75 of the last gap, 99 % is 0.95 of it
    assert sequence.p95 == pytest.approx(11 + 0.75 * 6) and sequence.p99 == pytest.approx(11 + 0.95 * 6)
    assert some["prompt"].histogram.counts[:9] == [1, 0, 0, 0, 1, 0, 0, 0, 1] and some["prompt"].histogram.width == 1


def test_a_histogram_holds_nearly_all_and_says_how_many_lie_beyond() -> None:
    # 99 of a hundred are below 70, so 40 bars of 2 hold them; the one of 5,000 does not stretch the picture
    examples = random_examples([(p % 70, (1, 1)) for p in range(99)] + [(5000, (1, 1))])
    histogram = lengths(sizes(examples))["prompt"].histogram
    assert (histogram.width, len(histogram.counts), histogram.beyond) == (2, 40, 1)
    # 0 .. 69 once, and 0 .. 28 again
    assert histogram.counts == [4] * 14 + [3] + [2] * 20 + [0] * 5


@settings(max_examples=50)
@given(shapes=SHAPES)
def test_no_histogram_loses_or_misplaces_a_value(shapes: list[tuple[int, int, int]]) -> None:
    examples = random_examples([(p, (c, r)) for p, c, r in shapes])
    histogram = lengths(sizes(examples))["prompt"].histogram
    edges = [i * histogram.width for i in range(len(histogram.counts) + 1)]
    for i, count in enumerate(histogram.counts):
        assert count == sum(edges[i] <= p < edges[i + 1] for p, _, _ in shapes)
    assert histogram.beyond == sum(p >= edges[-1] for p, _, _ in shapes) <= len(shapes) / 100
    bias = length_bias(sizes(examples))
    assert bias is not None
    longer = bias.longer_by
    for i, count in enumerate(longer.counts):
        assert count == sum(i * longer.width < c - r <= (i + 1) * longer.width for _, c, r in shapes)
    assert sum(longer.counts) + longer.beyond == bias.longer
    assert sum(bias.shorter_by.counts) + bias.shorter_by.beyond == bias.shorter == sum(c < r for _, c, r in shapes)


def test_which_answer_is_longer() -> None:
    bias = length_bias(sizes(random_examples([(3, (5, 2)), (3, (4, 4)), (3, (1, 3)), (3, (9, 8))])))
    assert bias is not None
    assert (bias.longer, bias.equal, bias.shorter, bias.longer_share) == (2, 1, 1, 0.5)
    assert (bias.mean, bias.median) == (0.5, 0.5)  # +3, 0, -2, +1
    nothing = [0] * 17
    assert bias.longer_by == Histogram(1, [1, 0, 1, *nothing], 0)
    assert bias.shorter_by == Histogram(1, [0, 1, 0, *nothing], 0)


def test_what_a_limit_costs_to_the_token() -> None:
    # longest sequences 512, 513, 1024 and 3000; tokens with the prompt twice 1022, 1024, 1624, 5001
    examples = random_examples([(500, (12, 10)), (500, (11, 13)), (600, (0, 424)), (2000, (1, 1000))])
    rows = {row.max_length: row for row in preview_truncation(sizes(examples), 600, "drop")}
    assert [*rows] == [512, 600, 1024, 2048, 4096, 8192]
    assert [row.max_length for row in rows.values() if row.recipe] == [600]
    assert [row.rows_lost for row in rows.values()] == [3, 2, 1, 1, 0, 0]
    assert [row.tokens_lost for row in rows.values()] == [7649, 6625, 5001, 5001, 0, 0]
    assert rows[600].rows_lost_share == 0.5 and rows[600].tokens_lost_share == pytest.approx(6625 / 8671)


def test_limits_go_on_by_doubling_where_that_changes_something() -> None:
    examples = random_examples([(10_000, (1, 1)), (200_000, (1, 1)), (5, (1, 1))])
    assert [(row.max_length, row.rows_lost) for row in preview_truncation(sizes(examples), 2048, "drop")] == [
        *((512, 2), (1024, 2), (2048, 2), (4096, 2), (8192, 2)),
        *((16_384, 1), (262_144, 0)),
    ]
    assert preview_truncation(sizes(examples), 65_536, "drop")[-2].recipe


def test_equal_answers_everywhere_have_no_bias_and_a_histogram() -> None:
    bias = length_bias(sizes(random_examples([(1, (2, 2)), (4, (1, 1))])))
    assert bias is not None
    assert (bias.longer, bias.equal, bias.shorter) == (0, 2, 0)
    assert np.sum(bias.longer_by.counts) == bias.longer_by.beyond == 0


def test_rankings_and_single_answers() -> None:
    """The first of several is the chosen one and is compared with each of the others; a single one has no rival."""
    examples = random_examples([(4, (7, 2, 9)), (6, (5,)), (0, (3, 3))])
    some = lengths(sizes(examples))
    assert {name: found.total for name, found in some.items()} == {
        **{"prompt": 10, "chosen": 7 + 3, "rejected": 2 + 9 + 3, "answer": 5},
        "sequence": 3 * 4 + 18 + 6 + 5 + 6,
    }
    bias = length_bias(sizes(examples))
    assert bias is not None and (bias.longer, bias.equal, bias.shorter, bias.mean) == (1, 1, 1, 1.0)  # +5, -2, 0
    assert preview_truncation(sizes(examples), 12, "drop")[0].tokens_lost == 3 * 4 + 18  # 4 + 9 tokens are too many
    single = random_examples([(6, (5,)), (0, (3,))])
    assert length_bias(sizes(single)) is None and set(lengths(sizes(single))) == {"prompt", "answer", "sequence"}


def test_what_a_limit_cuts_by_hand() -> None:
    # prompts of 500 and 600; answers of 20 and 10, of 30 and 40, of 1 and 2
    examples = random_examples([(500, (20, 10)), (480, (30, 40)), (600, (1, 2))])
    at = preview_truncation(sizes(examples), 505, "truncate_answers")[0]
    # room for 5, for 25, and none: 15 + 5, 5 + 15, and 601 + 602 tokens go
    assert (at.max_length, at.rows_cut, at.rows_lost, at.tokens_lost) == (505, 2, 1, 20 + 20 + 1203)
    at = preview_truncation(sizes(examples), 505, "truncate_prompt_left")[0]
    # the longest sequences are 15, 15 and 97 too long, and each prompt goes in front of two answers
    assert (at.rows_cut, at.rows_lost, at.tokens_lost) == (3, 0, 2 * (15 + 15 + 97))
    assert at.rows_cut_share == 1.0 and at.tokens_lost_share == pytest.approx(254 / (1030 + 1030 + 1203))


@settings(max_examples=60)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(1, 12), min_size=1, max_size=3)), min_size=1, max_size=6
    ),
    limit=st.integers(2, 24),
    policy=st.sampled_from(["drop", "truncate_answers", "truncate_prompt_left"]),
)
@example([(5, [3, 2])], 5, "truncate_answers")  # the prompt alone fills the limit
@example([(5, [4])], 5, "truncate_prompt_left")  # the BOS alone would be left
@example([(5, [4])], 6, "truncate_prompt_left")
@example([(9, [7, 11])], 13, "truncate_prompt_left")
def test_a_limit_costs_what_shortening_takes(
    shapes: list[tuple[int, list[int]]], limit: int, policy: OverLength
) -> None:
    """Each example is really shortened; a BOS stands before some of the prompts, and nowhere else: a cut that falls in
    front of another one takes a token less, which lengths alone do not tell."""
    examples, bos = random_examples(shapes), 1  # which no random token is
    for one in examples[::2]:
        one.prompt_ids[:1] = bos
    cut = lost = kept = 0
    for one in examples:
        try:
            shorter, notes = truncate(one, limit, policy, bos)
        except Unusable:
            lost += 1
        else:
            cut, kept = cut + bool(notes), kept + shorter.plain_tokens
    found = preview_truncation(sizes(examples, bos), limit, policy)
    [row] = [row for row in found if row.recipe]
    everything = sum(one.plain_tokens for one in examples)
    assert (row.rows_cut, row.rows_lost, row.tokens_lost) == (cut, lost, everything - kept)
