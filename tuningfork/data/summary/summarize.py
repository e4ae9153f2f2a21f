"""What a person wants to know of preference data before a GPU is rented: every number of it, computed once.

The terminal, data_report.json and the page all show the DataSummary that comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.summary.cost import FirstSteps, count_cost, plan_run
from tuningfork.data.summary.findings import findings
from tuningfork.data.summary.history import find_parted
from tuningfork.data.summary.mix import summarize_mix
from tuningfork.data.summary.records import DataSummary
from tuningfork.data.summary.repeats import find_leaks
from tuningfork.data.summary.sets import SetData, summarize_set
from tuningfork.data.summary.show import show_examples
from tuningfork.data.summary.sizes import Sizes
from tuningfork.data.summary.tokenizer import tokenizer_facts


def summarize(
    train: SetData,
    held_out: SetData | None,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    positions: int | None,
    data: DataConfig,
    pack: PackConfig,
    order: EpochOrder,
    limits: PackLimits,
    counted_for: str,
    compared: Mapping[str, EpochOrder] | None = None,
) -> DataSummary:
    """Count everything.

    Args:
        config: of the model; its vocab_size is looked at.
        positions: of the longest sequence that the model can be trained on.
        order: of the run.
        limits: how large the run's packs are.
        counted_for: the device that they are so large for, in words.
        compared: other orders of the examples, by their names, for what trees would save in them.
    """
    facts = tokenizer_facts(tokenizer, train.examples, data, config.vocab_size, positions)
    train_set = summarize_set("training", train, data, positions)
    eval_set = None if held_out is None else summarize_set("held-out", held_out, data, positions)
    epoch = replace(order, total_examples=len(train.examples))
    sizes, of_epoch = Sizes.of(train.sizes), FirstSteps.of(train.examples, epoch)
    of_run = of_epoch if order == epoch else FirstSteps.of(train.examples, order)
    leaks = None if held_out is None else find_leaks(train.examples, held_out.examples, tokenizer.bos_token_id)
    others = {
        name: FirstSteps.of(train.examples, replace(other, total_examples=len(train.examples)))
        for name, other in (compared or {}).items()
    }
    cost = count_cost(train.examples, sizes, of_epoch, limits, others)
    if limits.share == "tree":
        cost = replace(cost, parted=find_parted(of_epoch, len(train.examples), limits, tokenizer))
    pairs = all(len(example.answers) == 2 for example in train.examples)
    return DataSummary(
        unit="pair" if pairs else "example",
        findings=findings(train_set, eval_set, leaks, facts, cost),
        max_length=data.max_length,
        over_length=data.over_length,
        pack_tokens=pack.tokens,
        share=pack.share,
        mix=summarize_mix(train, data),
        train=train_set,
        eval=eval_set,
        leaks=leaks,
        cost=cost,
        run=plan_run(sizes, order, of_run, limits),
        counted_for=counted_for,
        tokenizer=facts,
        shown=show_examples(train.examples, tokenizer),
    )
