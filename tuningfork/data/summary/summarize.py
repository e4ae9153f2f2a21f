"""What a person wants to know of preference data before a GPU is rented: every number of it, computed once.

The terminal, data_report.json and the page all show this one tree. Rows are numbers in their file, from 1; lengths are
tokens; shares are of 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.loader import EpochOrder
from tuningfork.data.pack import PackLimits
from tuningfork.data.summary.cost import Cost, RunPlan, count_cost, plan_run
from tuningfork.data.summary.file import FileData, FileSummary, summarize_file
from tuningfork.data.summary.findings import Finding, findings
from tuningfork.data.summary.repeats import Leaks, find_leaks
from tuningfork.data.summary.show import ShownExample, show_examples
from tuningfork.data.summary.tokenizer import TokenizerFacts, tokenizer_facts


@dataclass(frozen=True, slots=True)
class DataSummary:
    """All of it. `eval` and `leaks` are None where the recipe names no eval file; cost is of the training file."""

    unit: str  # what the rows are: "pairs", or "examples" of any number of answers
    findings: list[Finding]
    max_length: int
    pack_tokens: int
    share_prompt: bool
    train: FileSummary
    eval: FileSummary | None
    leaks: Leaks | None
    cost: Cost
    run: RunPlan
    tokenizer: TokenizerFacts
    shown: list[ShownExample]

    @property
    def strict(self) -> list[Finding]:
        """The findings that `--strict` stops on."""
        return [finding for finding in self.findings if finding.strict]

    def as_dict(self) -> dict[str, Any]:
        """The tree in JSON's types, as data_report.json holds it."""
        return asdict(self)


def summarize(
    train: FileData,
    held_out: FileData | None,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    data: DataConfig,
    pack: PackConfig,
    order: EpochOrder,
    limits: PackLimits,
) -> DataSummary:
    """Count everything.

    Args:
        config: of the model; its vocab_size and max_position_embeddings are looked at.
        order: of the run.
        limits: how large the run's packs are.
    """
    positions = getattr(config, "max_position_embeddings", None)
    facts = tokenizer_facts(tokenizer, train.examples, data.template, config.vocab_size, positions)
    train_file = summarize_file(train, data.max_length, positions)
    eval_file = None if held_out is None else summarize_file(held_out, data.max_length, positions)
    leaks = None if held_out is None else find_leaks(train.examples, held_out.examples)
    pairs = all(len(example.answers) == 2 for example in train.examples)
    return DataSummary(
        unit="pairs" if pairs else "examples",
        findings=findings(train_file, eval_file, leaks, facts),
        max_length=data.max_length,
        pack_tokens=pack.tokens,
        share_prompt=pack.share_prompt,
        train=train_file,
        eval=eval_file,
        leaks=leaks,
        cost=count_cost(train.examples, order, limits),
        run=plan_run(train.examples, order, limits),
        tokenizer=facts,
        shown=show_examples(train.examples, tokenizer),
    )
