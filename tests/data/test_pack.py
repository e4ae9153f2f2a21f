"""The packer: nothing lost, nothing over a limit, no pack larger than it need be."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import random_examples, random_pairs
from tuningfork.data.pack import PackLimits, Rung, Size, pack, plan_limits, size_of, split_fitting
from tuningfork.errors import DataError
from tuningfork.records import TokenExample

SHAPE = st.tuples(st.integers(0, 40), st.lists(st.integers(1, 25), min_size=1, max_size=3).map(tuple))
SHAPES = st.lists(SHAPE, min_size=1, max_size=40)
TOKENS = st.sampled_from([64, 100, 128, 192, 333, 512])


def content(members: list[TokenExample], share_prompt: bool) -> tuple[int, int, int]:
    """(rows, segments, keys) that examples take up, counted one by one from the definition of the layout."""
    rows = segments = keys = 0
    for example in members:
        p = len(example.prompt_ids)
        rows += p if share_prompt else 0
        for answer in example.answers:
            rows += len(answer.ids) if share_prompt else p + len(answer.ids)
            segments += 1
            keys += p + len(answer.ids)
    return rows, segments, keys


def fits(rung: Rung, members: list[TokenExample], share_prompt: bool) -> bool:
    """Whether a pack of this shape can be laid out: padding fills rows and keys in segments within the cap."""
    rows, segments, keys = content(members, share_prompt)
    pad_rows = rung.tokens - rows
    spare_keys = rung.keys - keys - pad_rows
    if pad_rows < 1 or spare_keys < 0:
        return False
    return segments + ceil(pad_rows / rung.max_seqlen) + ceil(spare_keys / rung.max_seqlen) <= rung.segments


def first_fit(examples: list[TokenExample], limits: PackLimits) -> int:
    """Bins that the simplest packer needs: each example into the first bin with room, in the order given."""
    bins: list[list[TokenExample]] = []
    for example in examples:
        for members in bins:
            if fits(limits.full, [*members, example], limits.share_prompt):
                members.append(example)
                break
        else:
            bins.append([example])
    return len(bins)


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, tokens=TOKENS, share=st.booleans(), compiled=st.booleans())
def test_every_example_once_within_every_limit_in_the_smallest_shape(shapes, tokens, share, compiled):
    examples, dropped = split_fitting(random_examples(shapes), tokens, share)
    assert len(examples) + len(dropped) == len(shapes)
    if not examples:
        return
    limits = plan_limits(examples, tokens, share, compiled)
    bins = pack(examples, limits)

    assert Counter(id(e) for _, members in bins for e in members) == Counter(map(id, examples))
    for rung, members in bins:
        assert members, "an empty pack"
        assert fits(rung, members, share)
        smaller = [r for r in limits.rungs if r.tokens < rung.tokens]
        assert not any(fits(r, members, share) for r in smaller)
        assert [examples.index(e) for e in members] == sorted(examples.index(e) for e in members)
        assert all(e.longest <= rung.max_seqlen for e in members)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, tokens=TOKENS, share=st.booleans())
def test_the_same_examples_give_the_same_packs(shapes, tokens, share):
    examples, _ = split_fitting(random_examples(shapes), tokens, share)
    if not examples:
        return
    limits = plan_limits(examples, tokens, share, compiled=True)

    def names() -> list[tuple[Rung, list[str]]]:
        return [(rung, [e.id for e in members]) for rung, members in pack(list(examples), limits)]

    assert names() == names()


def test_size_of_counts_the_prompt_once_when_shared():
    [example] = random_examples([(7, (5, 9, 2))])
    assert size_of(example, share_prompt=True) == Size(tokens=7 + 16, segments=3, keys=3 * 7 + 16)
    assert size_of(example, share_prompt=False) == Size(tokens=3 * 7 + 16, segments=3, keys=3 * 7 + 16)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_split_fitting_keeps_one_row_for_padding(share):
    # 63 rows either way of counting: shared 21 + 42, unshared 2 * 21 + 21.
    kept_shape, dropped_shape = ((21, (20, 22)), (21, (20, 23))) if share else ((21, (10, 11)), (21, (10, 12)))
    kept, dropped = split_fitting(random_examples([kept_shape, dropped_shape]), 64, share)
    assert [e.source.row for e in kept] == [1]
    assert [(d.file, d.row, d.reason) for d in dropped] == [("random", 2, "larger than a pack")]
    assert dropped[0].detail == "needs 65 rows, pack.tokens is 64"
    assert len(pack(kept, plan_limits(kept, 64, share, compiled=False))) == 1


def test_split_fitting_counts_every_example():
    examples = random_examples([(p, (30, 30)) for p in range(40)])  # p + 60 rows: 4 of 64 rows or fewer fit
    kept, dropped = split_fitting(examples, 64, share_prompt=True)
    assert [len(e.prompt_ids) for e in kept] == [0, 1, 2, 3]
    assert [d.row for d in dropped] == list(range(5, 41))


def test_an_example_larger_than_a_pack_is_an_error_that_names_it():
    small = random_examples([(4, (5, 6))] * 3)
    limits = plan_limits(small, 64, share_prompt=True, compiled=False)
    large = random_examples([(4, (5, 6)), (30, (20, 20))])
    with pytest.raises(DataError, match=r"random:2: needs 71 rows, but a pack has 64"):
        pack(large, limits)


def test_an_example_with_more_answers_than_segments_is_refused_not_lost():
    pairs = random_examples([(20, (20, 20))])
    limits = plan_limits(pairs, 64, share_prompt=True, compiled=False)
    crowd = random_examples([(1, (1,) * 40)])  # few rows, but 40 segments
    with pytest.raises(DataError, match="random:1"):
        pack(crowd, limits)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_packs_are_as_full_as_first_fit_makes_them(seed, share):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3, 0.8, (150, 3)), 1, 150).astype(int)  # long-tailed, as answers are
    examples, _ = split_fitting(random_examples([(int(p), (int(a), int(b))) for p, a, b in lengths]), 512, share)
    limits = plan_limits(examples, 512, share, compiled=False)
    bins = pack(examples, limits)
    rows = sum(rung.tokens for rung, _ in bins)
    used = sum(content(members, share)[0] for _, members in bins)
    assert len(bins) <= first_fit(examples, limits)
    assert 1 - used / rows < 0.06


def test_compiled_ladder_has_four_shapes_at_most_and_the_eager_one_many():
    examples = random_pairs(20)

    def rows(tokens: int, compiled: bool) -> list[int]:
        return [r.tokens for r in plan_limits(examples, tokens, True, compiled).rungs]

    assert rows(4096, compiled=True) == [1024, 2048, 3072, 4096]
    # Nothing below 1024 rows, where the compiler would add up in another order.
    assert rows(2048, compiled=True) == [1024, 1536, 2048]
    assert rows(1500, compiled=True) == [1152, 1500]
    assert rows(1000, compiled=True) == [1000]
    assert rows(1000, compiled=False) == [*range(64, 1000, 64), 1000]
    assert plan_limits(examples, 4096, True, compiled=True).full == plan_limits(examples, 4096, True, False).full


def test_a_small_last_pack_takes_a_small_shape():
    examples = random_pairs(3)
    [(compiled, _)] = pack(examples, plan_limits(examples, 4096, True, compiled=True))
    [(eager, members)] = pack(examples, plan_limits(examples, 4096, True, compiled=False))
    assert compiled.tokens == 1024
    assert eager.tokens == 64 * (content(members, True)[0] // 64 + 1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("tokens", [64, 65, 100, 180, 256, 1000, 1100, 8192, 10_000])
def test_no_shape_is_larger_than_a_full_pack(tokens, compiled):
    examples = random_examples([(3, (4, 5))])
    limits = plan_limits(examples, tokens, True, compiled)
    assert [r.tokens for r in limits.rungs] == sorted({r.tokens for r in limits.rungs})
    assert limits.full.tokens == tokens


def test_max_seqlen_is_tight():
    """Attention kernels launch work in proportion to it: the longest sequence, rounded up to 128, and no more."""
    for longest, expected in ((5, 128), (128, 128), (129, 256)):
        examples = random_examples([(2, (longest - 2, 1)), (1, (1, 1))])
        for tokens in (512, 4096):
            assert {r.max_seqlen for r in plan_limits(examples, tokens, True, compiled=True).rungs} == {expected}


def test_limits_hold_the_widest_fork_beside_a_pack_full_of_short_examples():
    """Key and segment limits follow averages, but an example far from the average must still fit by itself."""
    examples = random_examples([(1, (2,))] * 200 + [(200, (3,) * 12)])
    limits = plan_limits(examples, 256, share_prompt=True, compiled=True)
    bins = pack(examples, limits)
    assert sum(len(members) for _, members in bins) == 201
    assert fits(limits.full, [examples[-1]], True)
