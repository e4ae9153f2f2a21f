"""The packer: nothing lost, nothing over the limit, no pack larger than it need be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.data.packing.alike import SHARES, alike, check_forest, example_of, sequences
from tests.tiny import limits_of, random_examples, random_pairs
from tuningfork.data.packing import pack as module
from tuningfork.data.packing.bin_packing import stream_fit
from tuningfork.data.packing.pack import (
    Bin,
    PackLimits,
    pack_evenly,
    pack_examples,
    pack_stream,
    portions_of,
    slots_of_each,
    split_fitting,
)
from tuningfork.data.packing.tree import Share, grow
from tuningfork.errors import DataError
from tuningfork.records import TokenExample

SHAPE = st.tuples(st.integers(0, 40), st.lists(st.integers(1, 25), min_size=1, max_size=3).map(tuple))
SHAPES = st.lists(SHAPE, min_size=1, max_size=40)
TOKENS = st.sampled_from([64, 100, 128, 192, 333, 512, 1024, 1500])
FORKS: list[Share] = ["none", "prompt"]  # where examples share nothing, and so are packed one by one


def content(members: Sequence[TokenExample], share: Share) -> int:
    """Rows that examples take up, counted one by one from the definition of the layout."""
    assert share in FORKS
    slots = 0
    for example in members:
        for i, answer in enumerate(example.answers):
            if i == 0 or share == "none":
                slots += len(example.prompt_ids)
            slots += len(answer.ids)
    return slots


def packed(examples: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    return pack_examples(portions_of(examples, limits), limits)


def evenly(examples: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    return pack_evenly(portions_of(examples, limits), limits)


def smallest_shape(used: int, tokens: int, compiled: bool) -> int:
    """The first of the allowed numbers of slots that holds the content, and no more than hold a full pack's."""
    quantum, first = (128, 1024) if compiled else (64, 64)
    full = next(slots for slots in range(quantum, tokens + quantum, quantum) if slots >= tokens)
    return next((slots for slots in range(first, full, quantum) if slots >= used), full)


def first_fit(examples: list[TokenExample], limits: PackLimits) -> int:
    """Bins that the simplest packer needs: each example into the first bin with room, in the order given."""
    bins: list[list[TokenExample]] = []
    for example in examples:
        for members in bins:
            if content([*members, example], limits.share) <= limits.tokens:
                members.append(example)
                break
        else:
            bins.append([example])
    return len(bins)


def best_fit_decreasing(examples: list[TokenExample], limits: PackLimits) -> list[list[int]]:
    """The packer's words as slow code: the largest first, each into the fullest bin that still holds it.

    Of examples of a size the first comes first, of bins as full as each other the oldest is taken.
    """

    def slots(members: list[int]) -> int:
        return content([examples[i] for i in members], limits.share)

    bins: list[list[int]] = []
    waiting = list(range(len(examples)))
    while waiting:
        largest = max(waiting, key=lambda i: slots([i]))
        waiting.remove(largest)
        holding = [members for members in bins if slots([*members, largest]) <= limits.tokens]
        if holding:
            max(holding, key=slots).append(largest)
        else:
            bins.append([largest])
    return [sorted(members) for members in bins]


@settings(max_examples=80)
@given(shapes=SHAPES, tokens=TOKENS, share=st.sampled_from(FORKS), compiled=st.booleans())
def test_every_example_once_within_the_limit_in_the_smallest_shape(shapes, tokens, share, compiled):
    examples, dropped = split_fitting(random_examples(shapes), tokens, share)
    assert len(examples) + len(dropped) == len(shapes)
    bins = packed(examples, PackLimits.plan(tokens, share, compiled))

    assert Counter(id(e) for _, members, _ in bins for e in members) == Counter(map(id, examples))
    for slots, members, _ in bins:
        assert members, "an empty pack"
        assert content(members, share) <= min(slots, tokens)
        assert slots == smallest_shape(content(members, share), tokens, compiled)
        assert [examples.index(e) for e in members] == sorted(examples.index(e) for e in members)


@settings(max_examples=80)
@given(
    # Few lengths, so that many examples and many bins are of one size.
    shapes=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(1, 30), min_size=1, max_size=3)), max_size=60),
    tokens=st.sampled_from([94, 100, 128]),
    share=st.sampled_from(FORKS),
)
def test_the_search_for_a_bin_finds_what_a_slow_one_finds(shapes, tokens, share):
    examples, _ = split_fitting(random_examples(shapes), tokens, share)
    limits = limits_of(tokens, share)
    place = {id(e): i for i, e in enumerate(examples)}
    found = [[place[id(e)] for e in members] for _, members, _ in packed(examples, limits)]
    assert found == best_fit_decreasing(examples, limits)


def test_best_fit_written_out_by_hand():
    examples = random_examples([(0, (n,)) for n in (30, 60, 40, 50, 10, 50, 60, 20)])
    bins = [[e.unique_tokens for e in members] for _, members, _ in packed(examples, limits_of(100))]
    # The two 60s open bins, the 50s share one, 40 fills the first and 30 goes into the second; 20 finds no room
    # and 10 prefers the 10 slots left in the second to the 80 beside the 20. In a bin, the given order.
    assert bins == [[60, 40], [30, 10, 60], [50, 50], [20]]


@settings(max_examples=80)
@given(shapes=SHAPES, tokens=TOKENS, share=st.sampled_from(FORKS), compiled=st.booleans())
def test_even_packs_are_as_few_and_no_larger(shapes, tokens, share, compiled):
    examples, _ = split_fitting(random_examples(shapes), tokens, share)
    limits = PackLimits.plan(tokens, share, compiled)
    fewest, even = packed(examples, limits), evenly(examples, limits)
    assert len(even) <= len(fewest)
    assert Counter(id(e) for _, members, _ in even for e in members) == Counter(map(id, examples))
    for slots, members, _ in even:
        assert slots == smallest_shape(content(members, share), tokens, compiled)
    largest = [max((content(members, share) for _, members, _ in bins), default=0) for bins in (even, fewest)]
    assert largest[0] <= largest[1]


def test_even_packs_by_hand():
    examples = random_examples([(0, (n,)) for n in (60, 30, 20, 10)])
    filled = [[e.unique_tokens for e in members] for _, members, _ in packed(examples, limits_of(100))]
    assert filled == [[60, 30, 10], [20]]
    bins = [[e.unique_tokens for e in members] for _, members, _ in evenly(examples, limits_of(100))]
    assert bins == [[60], [30, 20, 10]]


@settings(max_examples=80)
@given(shapes=SHAPES, tokens=TOKENS, share=st.sampled_from(FORKS), compiled=st.booleans(), window=st.integers(0, 45))
def test_a_stream_of_packs_has_every_example_once(shapes, tokens, share, compiled, window):
    examples, _ = split_fitting(random_examples(shapes), tokens, share)
    limits = PackLimits.plan(tokens, share, compiled)
    bins = list(pack_stream(examples, limits, window))
    assert Counter(id(e) for _, members, _ in bins for e in members) == Counter(map(id, examples))
    place = {id(e): i for i, e in enumerate(examples)}
    chosen = [[place[id(e)] for e in members] for _, members, _ in bins]
    assert chosen == list(stream_fit([content([e], share) for e in examples], tokens, window))
    for slots, members, _ in bins:
        assert slots == smallest_shape(content(members, share), tokens, compiled)
    if len(examples) <= window:
        even = evenly(examples, limits)
        assert [(n, list(members)) for n, members, _ in bins] == [(n, list(members)) for n, members, _ in even]


def test_a_stream_of_packs_by_hand():
    examples = random_examples([(0, (n,)) for n in (60, 50, 30, 40, 50, 20)])
    bins = list(pack_stream(examples, limits_of(100), window=4))
    assert [(slots, [e.unique_tokens for e in members]) for slots, members, _ in bins] == [
        (128, [60, 40]),
        (128, [50, 30]),  # the last four in packs of like size, rather than 50 + 50 and 30 + 20
        (128, [50, 20]),
    ]


@settings(max_examples=25)
@given(shapes=SHAPES, tokens=TOKENS, share=st.sampled_from(FORKS))
def test_the_same_examples_give_the_same_packs(shapes, tokens, share):
    examples, _ = split_fitting(random_examples(shapes), tokens, share)

    def names() -> list[tuple[int, list[str]]]:
        bins = packed(list(examples), PackLimits.plan(tokens, share, compiled=True))
        return [(slots, [e.id for e in members]) for slots, members, _ in bins]

    assert names() == names()


def test_no_examples_need_no_pack():
    assert packed([], limits_of()) == []


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("p", [0, 7])
def test_rows_count_the_prompt_once_when_shared(p, k):
    answers = (5, 9, 2)[:k]
    [example] = random_examples([(p, answers)])
    assert slots_of_each([example], "prompt") == [p + sum(answers)] == [content([example], "prompt")]
    assert slots_of_each([example], "none") == [k * p + sum(answers)] == [content([example], "none")]
    # What its answers begin with alike is not counted off: it must fit a pack whatever that is.
    assert slots_of_each([example], "tree") == slots_of_each([example], "prompt")


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("share", FORKS)
def test_an_example_may_fill_a_pack_to_the_last_row(share, compiled):
    # 64 slots either way of counting: shared 21 + 43, unshared 2 * 21 + 22; the other has one more.
    kept_shape, dropped_shape = (
        ((21, (20, 23)), (21, (20, 24))) if share == "prompt" else ((21, (10, 12)), (21, (10, 13)))
    )
    kept, dropped = split_fitting(random_examples([kept_shape, dropped_shape]), 64, share)
    assert [e.source.row for e in kept] == [1]
    assert [(d.file, d.row, d.reason) for d in dropped] == [("random", 2, "larger than a pack")]
    assert dropped[0].detail == "needs 65 tokens, pack.tokens is 64"
    ((slots, members, _),) = packed(kept, PackLimits.plan(64, share, compiled))
    assert (slots, list(members)) == (128 if compiled else 64, list(kept))


def test_examples_together_may_fill_a_pack_to_the_last_row():
    examples = random_examples([(10, (20, 30)), (4, (16, 20))])  # 60 + 40 slots
    assert [(slots, members) for slots, members, _ in packed(examples, limits_of(100))] == [(128, examples)]
    assert [(slots, len(members)) for slots, members, _ in packed(examples, limits_of(99))] == [(64, 1), (64, 1)]


def test_split_fitting_counts_every_example():
    examples = random_examples([(p, (30, 30)) for p in range(40)])  # p + 60 slots: 64 slots or fewer fit
    kept, dropped = split_fitting(examples, 64, share="prompt")
    assert [len(e.prompt_ids) for e in kept] == [0, 1, 2, 3, 4]
    assert [d.row for d in dropped] == list(range(6, 41))


@settings(max_examples=40)
@given(shapes=SHAPES, share=st.sampled_from(FORKS))
def test_the_packer_takes_what_split_fitting_keeps_and_nothing_else(shapes, share):
    examples = random_examples(shapes)
    kept, _ = split_fitting(examples, 64, share)
    for example in examples:
        if example in kept:
            assert len(packed([example], limits_of(64, share))) == 1
        else:
            with pytest.raises(DataError):
                packed([example], limits_of(64, share))


@pytest.mark.parametrize(("share", "needed"), [("prompt", 70), ("tree", 70), ("none", 100)])
def test_an_example_larger_than_a_pack_is_an_error_that_names_it(share, needed):
    large = random_examples([(4, (5, 6)), (30, (20, 20))])
    with pytest.raises(DataError, match=rf"random:2: needs {needed} tokens, but a pack has 64\. Raise pack\.tokens or"):
        packed(large, limits_of(64, share))
    with pytest.raises(DataError, match=rf"random:2: needs {needed} tokens"):
        pack_stream(large, limits_of(64, share), window=1)  # before any pack is asked for


def test_any_number_of_answers_fits_that_has_the_rows():
    crowd = random_examples([(1, (1,) * 63)])
    assert [(slots, members) for slots, members, _ in packed(crowd, limits_of(64))] == [(64, crowd)]
    # Far from the average of its neighbours, too.
    examples = random_examples([(1, (2,))] * 200 + [(200, (3,) * 12)])
    bins = packed(examples, limits_of(256))
    assert sum(len(members) for _, members, _ in bins) == 201
    assert all(content(members, "prompt") <= slots <= 256 for slots, members, _ in bins)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", FORKS)
def test_packs_are_as_full_as_first_fit_makes_them(seed, share):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3, 0.8, (150, 3)), 1, 150).astype(int)  # long-tailed, as answers are
    examples, _ = split_fitting(random_examples([(int(p), (int(a), int(b))) for p, a, b in lengths]), 512, share)
    limits = limits_of(512, share)
    bins = packed(examples, limits)
    slots = sum(slots for slots, _, _ in bins)
    used = sum(content(members, share) for _, members, _ in bins)
    assert len(bins) <= first_fit(examples, limits)
    assert 1 - used / slots < 0.03


def test_rows_of_a_compiled_pack():
    """Multiples of 128, none below 1024 slots, where the compiler would add up in another order."""
    limits = PackLimits.plan(4096, "prompt", compiled=True)
    used = (1, 900, 1024, 1025, 1152, 1153, 3968, 3969, 4096)
    assert [limits.slots(n) for n in used] == [1024, 1024, 1024, 1152, 1152, 1280, 3968, 4096, 4096]
    small = PackLimits.plan(1000, "prompt", compiled=True)
    assert [small.slots(n) for n in (1, 128, 999, 1000)] == [1024] * 4
    assert [PackLimits.plan(600, "prompt", compiled=True).slots(n) for n in (1, 600)] == [640] * 2


def test_rows_of_an_eager_pack():
    limits = PackLimits.plan(1000, "prompt", compiled=False)
    used = (1, 64, 65, 128, 129, 960, 961, 1000)
    assert [limits.slots(n) for n in used] == [64, 64, 128, 128, 192, 960, 1024, 1024]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("tokens", [1, 64, 65, 100, 180, 256, 1000, 1100, 1500, 8192, 10_000])
def test_rows_hold_the_content_and_are_a_multiple_of_the_quantum_in_a_full_pack_too(tokens, compiled):
    """A recurrent block's products give rows of a pack of any other size other bits."""
    limits = PackLimits.plan(tokens, "prompt", compiled)
    slots = [limits.slots(used) for used in range(1, tokens + 1)]
    assert slots == [smallest_shape(used, tokens, compiled) for used in range(1, tokens + 1)]
    assert slots == sorted(slots)
    assert all(used <= n for used, n in enumerate(slots, start=1))
    assert not any(n % limits.quantum for n in slots) and slots[-1] - tokens < limits.quantum


def test_a_small_last_pack_takes_few_rows():
    examples = random_pairs(3)
    [(compiled, _, _)] = packed(examples, PackLimits.plan(4096, "prompt", compiled=True))
    [(eager, members, _)] = packed(examples, PackLimits.plan(4096, "prompt", compiled=False))
    assert compiled == 1024
    assert eager == 64 * -(-content(members, "prompt") // 64)


def check_trees(bins: Sequence[Bin], examples: Sequence[TokenExample], limits: PackLimits) -> None:
    """Every example once, in packs whose trees are its own and which are no larger than they need be."""
    assert Counter(id(e) for found in bins for e in found.examples) == Counter(map(id, examples))
    for found in bins:
        check_forest(found.forest, found.examples)
        assert found.slots == smallest_shape(found.forest.rows, limits.tokens, limits.smallest == 1024)
        assert found.forest.rows <= limits.tokens


@settings(max_examples=100)
@given(examples=alike(20), share=st.sampled_from(SHARES), room=st.integers(0, 100), compiled=st.booleans())
def test_trees_lie_in_packs_whole_and_never_take_more_rows_than_forks(examples, share, room, compiled):
    tokens = int(slots_of_each(examples, "none").max()) + room
    limits = PackLimits.plan(tokens, share, compiled)
    every = [packed(examples, limits), evenly(examples, limits), list(pack_stream(examples, limits, 6))]
    for bins in every:
        check_trees(bins, examples, limits)
        assert sum(found.forest.rows for found in bins) <= slots_of_each(examples, share).sum()
    # Parts of a tree that come to lie in one pack have in common there what they had before.
    rows = sum(portion.rows for portion in portions_of(examples, limits))
    assert all(sum(found.forest.rows for found in bins) <= rows for bins in every)


@settings(max_examples=60)
@given(examples=alike(12), copies=st.integers(0, 3), room=st.integers(0, 100), random=st.randoms())
def test_examples_in_another_order_have_the_same_packs(examples, copies, room, random):
    """Trees lie in the order of their tokens. Examples that are the same as others change places at most."""
    examples += random.choices(examples, k=copies)
    by_first = {min(sequences(e)): sequences(e) for e in examples}
    assume(all(by_first[min(sequences(e))] == sequences(e) for e in examples))  # else the first of two comes first
    limits = limits_of(int(slots_of_each(examples, "none").max()) + room, "tree")

    def contents(order: Sequence[TokenExample]) -> list[list[list[tuple[int, ...]]]]:
        return [[sequences(example) for example in found.examples] for found in evenly(order, limits)]

    assert contents(random.sample(examples, len(examples))) == contents(examples)


TWO_STEMS = [example_of(row, [1 + row % 2] * 60, [10 + row] * 4) for row in range(12)]
"""Examples of two stems that take turns."""


def test_a_stream_finds_trees_among_all_examples_of_a_window():
    bins = list(pack_stream(TWO_STEMS, limits_of(64 + 5 * 4, "tree"), window=4))
    assert [sorted(e.source.row for e in found.examples) for found in bins] == [
        [0, 2, 4, 6, 8, 10],
        [1, 3, 5, 7, 9, 11],
    ]
    assert [found.forest.rows for found in bins] == [84, 84]


def test_a_stream_looks_for_trees_no_further_than_a_window(monkeypatch):
    """Six of the examples, of 64 tokens each, are a window: one stem is there twice."""
    monkeypatch.setattr(module, "WINDOW_TOKENS", 6 * 64 + 63)
    bins = list(pack_stream(TWO_STEMS, limits_of(60 + 3 * 4, "tree"), window=4))
    assert [sorted(e.source.row for e in found.examples) for found in bins] == [
        [0, 2, 4],
        [1, 3, 5],
        [6, 8, 10],
        [7, 9, 11],
    ]


@settings(max_examples=60)
@given(shapes=SHAPES, tokens=st.integers(1, 300))
def test_windows_are_the_examples_in_their_order(shapes, tokens):
    examples = random_examples(shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_TOKENS", tokens)
        windows = list(module.windows_of(examples))
    assert [id(e) for window in windows for e in window] == [id(e) for e in examples]
    sizes = [sum(e.plain_tokens for e in window) for window in windows]
    assert all(size <= tokens or len(window) == 1 for size, window in zip(sizes, windows, strict=True))
    # Each takes as many as it can.
    assert all(size + after[0].plain_tokens > tokens for size, after in zip(sizes, windows[1:], strict=False))


@pytest.mark.parametrize("share", SHARES)
def test_packs_of_a_stream_are_nearly_full(share):
    """Conversations, of which some turns are examples: hardly a row of the packs is free."""
    rng = np.random.default_rng(0)
    examples = []
    for conversation in range(240):
        turns = rng.integers(10, 1000, 260)
        for row in range(4):
            cut = int(rng.integers(20, 230))
            answers = (rng.integers(1000, 2000, int(n)) for n in rng.integers(3, 30, 2))
            examples.append(example_of(4 * conversation + row, turns[:cut], *answers))
    order = [examples[n] for n in rng.permutation(len(examples))]
    bins = list(pack_stream(order, limits_of(2048, share), window=60))
    rows = [found.forest.rows for found in bins]
    if share == "tree":  # the packs of a window are of like size, so what one of them could take is spread over all
        assert sum(rows) > 2048 * (len(rows) - 2)
        assert sum(rows) < 1.01 * grow(order, "tree").lengths.sum() < 0.75 * slots_of_each(order, "prompt").sum()
    else:
        assert sum(rows[: len(rows) // 2]) > 0.99 * 2048 * (len(rows) // 2)
