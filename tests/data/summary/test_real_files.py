"""The summary of real files, against statistics of the same files that were counted by other code.

Those were taken of all rows, unusable ones included, so hh's differ a little: 15 of its 2,354 rows are dropped here.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.test_real_files import DATA, DPO_EN, HH, HH_DROPS, smollm2
from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.packing.bin_packing import best_fit
from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.summary.records import DataSummary
from tuningfork.data.summary.sets import SetData
from tuningfork.data.summary.summarize import summarize
from tuningfork.data.tokens.tokenize import MERGES

pytestmark = pytest.mark.skipif(not HH.exists(), reason="no real data: set TUNINGFORK_DATA to a folder that has it")


def summary_of(path: Path, max_length: int) -> DataSummary:
    tokenizer = smollm2()
    config = DataConfig(max_length=max_length)
    examples, report = prepare_examples(path, tokenizer, config, len(tokenizer))
    data = SetData.of(examples, report, tokenizer.bos_token_id)
    model = SimpleNamespace(vocab_size=len(tokenizer), max_position_embeddings=8192)
    order = EpochOrder.plan(len(examples), 32, 0, 1.0, None)
    limits = PackLimits.plan(2 * max_length, "prompt", compiled=True)
    return summarize(
        data,
        None,
        tokenizer,
        model,
        model.max_position_embeddings,
        config,
        PackConfig(tokens=2 * max_length),
        order,
        limits,
        "a CPU",
    )


def published(summary: DataSummary) -> dict[str, list[int]]:
    """mean, p50, p95 and max of each length, as whole numbers."""
    return {
        name: [round(some.mean), round(some.p50), round(some.p95), some.max]
        for name, some in summary.train.lengths.items()
    }


def test_hh() -> None:
    summary = summary_of(HH, 4096)
    assert (summary.train.rows_read, summary.train.used) == (2354, 2339)
    assert summary.train.dropped == {reason: len(rows) for reason, rows in HH_DROPS.items()}
    assert (summary.train.empty_answers, summary.train.identical_answers) == (4, 2)
    expected = {
        "prompt": [162, 128, 407, 1012],
        "chosen": [59, 43, 161, 769],
        "rejected": [45, 32, 127, 511],
        "sequence": [214, 180, 483, 1083],
    }
    for name, numbers in published(summary).items():
        assert numbers == pytest.approx(expected[name], abs=1), name
    cost = summary.cost
    padded, packed, shared, trees, together = cost.layouts
    assert shared.tokens >= trees.tokens >= together.tokens
    assert cost.tokens == pytest.approx(1_008_662 * 2339 / 2354, rel=0.002)
    assert 2 * padded.prompt / cost.tokens == pytest.approx(0.757, abs=0.002)
    assert padded.pad_share == pytest.approx(0.552, abs=0.002)  # of batches of 8 pairs, the mean of 20 shuffles
    assert shared.tokens_saved == pytest.approx(0.377, abs=0.002)
    assert shared.attention_saved == pytest.approx(0.326, abs=0.002)
    assert packed.pad_share < 0.03 and shared.pad_share < 0.03
    assert padded.slots / packed.slots == pytest.approx(2.2, abs=0.06)
    assert padded.slots / shared.slots == pytest.approx(3.6, abs=0.1)


def test_dpo_en() -> None:
    """No row of it is dropped at 8192, so every number is that of the whole file."""
    summary = summary_of(DPO_EN, 8192)
    assert summary.train.used == 300
    assert published(summary) == {
        "prompt": [447, 188, 1378, 4100],
        "chosen": [311, 317, 646, 1183],
        "rejected": [341, 342, 673, 1029],
        "sequence": [773, 576, 1877, 4574],
    }
    cost = summary.cost
    padded, packed, shared, trees, together = cost.layouts
    assert shared.tokens >= trees.tokens >= together.tokens
    assert cost.tokens == 463_807
    assert f"{2 * padded.prompt / cost.tokens:.3f}" == "0.578" and f"{cost.counted_tokens / cost.tokens:.3f}" == "0.422"
    assert padded.slots / packed.slots == pytest.approx(2.3, abs=0.06)
    assert padded.slots / shared.slots == pytest.approx(3.3, abs=0.06)
    assert f"{shared.tokens_saved:.3f}" == "0.289" and f"{shared.attention_saved:.3f}" == "0.242"
    assert padded.pad_share == pytest.approx(0.576, abs=0.006)
    with gzip.open(DPO_EN, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    again = Counter(json.dumps([row["conversations"], row["chosen"], row["rejected"]]) for row in rows)
    assert summary.train.repeats.duplicate_rows == sum(count - 1 for count in again.values()) == 5


def test_rows_that_are_too_long_count_for_the_limits_and_nowhere_else() -> None:
    """At 2048, 12 pairs of dpo_en are dropped; what the limits would cost is the same as when all are used."""
    short, whole = summary_of(DPO_EN, 2048), summary_of(DPO_EN, 8192)
    assert (short.train.used, short.train.lengths["sequence"].max < 2049) == (288, True)
    lost = [
        {row.max_length: (row.rows_lost, row.tokens_lost) for row in summary.train.truncation}
        for summary in (short, whole)
    ]
    assert lost[0] == lost[1] and lost[0][2048][0] == 12 and lost[0][8192] == (0, 0)


def test_llmbar() -> None:
    summary = summary_of(DATA / "llmbar.jsonl.gz", 4096)
    assert (summary.train.rows_read, summary.train.used, summary.train.dropped) == (419, 419, {})
    assert published(summary) == {
        "prompt": [67, 47, 144, 807],
        "chosen": [74, 38, 265, 577],
        "rejected": [148, 74, 523, 767],
        "sequence": [178, 112, 509, 843],
    }
    cost = summary.cost
    padded, shared = cost.layout("padded"), cost.layout("shared")
    assert cost.tokens == 149_036
    assert f"{2 * padded.prompt / cost.tokens:.3f}" == "0.374" and f"{cost.counted_tokens / cost.tokens:.3f}" == "0.626"
    assert f"{shared.tokens_saved:.3f}" == "0.187" and f"{shared.attention_saved:.3f}" == "0.083"
    assert padded.pad_share == pytest.approx(0.667, abs=0.006)


@pytest.mark.parametrize(("path", "rows"), [(HH, 2339), (DPO_EN, 300), (DATA / "llmbar.jsonl.gz", 419)])
def test_no_row_has_a_token_across_its_border(path: Path, rows: int) -> None:
    """With this tokenizer and these formats a prompt has the same ids by itself, counted by encoding both ways."""
    _, report = prepare_examples(path, smollm2(), DataConfig(max_length=8192), len(smollm2()))
    assert report.used == rows and MERGES not in report.notes


# Of the whole file, each kind of item by itself: capacity -> bins of sequences, of pairs, of shared prompts; then how
# many items are too long for any.
DPO_EN_BINS = {2048: (204, 103, 125), 4096: (112, 104, 80), 8192: (57, 56, 41), 16384: (29, 29, 21)}
DPO_EN_LEFT = {2048: (19, 83, 31), 4096: (2, 8, 1), 8192: (0, 1, 0), 16384: (0, 0, 0)}


def test_dpo_en_fills_as_many_bins_as_were_counted() -> None:
    examples, _ = prepare_examples(DPO_EN, smollm2(), DataConfig(max_length=8192), len(smollm2()))
    kinds = (
        [len(each.prompt_ids) + len(answer.ids) for each in examples for answer in each.answers],
        [each.plain_tokens for each in examples],
        [each.unique_tokens for each in examples],
    )
    for capacity, bins in DPO_EN_BINS.items():
        fitting = [[size for size in sizes if size <= capacity] for sizes in kinds]
        assert tuple(int(best_fit(sizes, capacity).max()) + 1 for sizes in fitting) == bins
        assert tuple(len(a) - len(b) for a, b in zip(kinds, fitting, strict=True)) == DPO_EN_LEFT[capacity]
