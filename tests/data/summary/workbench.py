"""Small files of pairs and what is counted of them, by tokenizers of which every id is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.sources.expand import Use
from tuningfork.data.summary.records import DataSummary
from tuningfork.data.summary.sets import SetData
from tuningfork.data.summary.sizes import Sizes
from tuningfork.data.summary.summarize import summarize
from tuningfork.data.tokens.truncate import size_of
from tuningfork.records import TokenExample


def pair(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sizes(examples: Sequence[TokenExample], bos: int | None = None) -> Sizes:
    return Sizes.of(size_of(example, bos) for example in examples)


def read(path: str | list[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig, use: Use = "train") -> SetData:
    examples, report = prepare_examples(path, tokenizer, config, 260, use=use)
    return SetData.of(examples, report, tokenizer.bos_token_id)


def summary_of(
    folder: Path,
    rows: Sequence[Any],
    held_out: Sequence[Any] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    template: str = "none",
    max_length: int = 64,
    positions: int | None = 1000,
    per_step: int = 2,
    epochs: float = 1.0,
    share: Share = "prompt",
    **settings: Any,
) -> DataSummary:
    """The summary of some rows; one token a byte unless another tokenizer is given. `settings` are of DataConfig."""
    train = write(folder / "train.jsonl", rows)
    other = None if held_out is None else write(folder / "eval.jsonl", held_out)
    tokenizer = tokenizer or byte_bpe()
    config = DataConfig(train, eval=other, template=template, max_length=max_length, **settings)  # type: ignore[arg-type]
    return summary_of_files(config, tokenizer, positions, per_step, epochs, share)


def summary_of_files(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    positions: int | None = 1000,
    per_step: int = 2,
    epochs: float = 1.0,
    share: Share = "prompt",
) -> DataSummary:
    """The summary of the files that the settings name."""
    tokenizer = tokenizer or byte_bpe()
    train = read(config.train, tokenizer, config)
    other = None if config.eval is None else read(config.eval, tokenizer, config, "eval")
    order = EpochOrder.plan(len(train.examples), per_step, 0, epochs, None)
    return _summary(train, other, tokenizer, config, positions, order, share)


def summary_of_examples(examples: Sequence[TokenExample]) -> DataSummary:
    """The summary of examples of any number of answers."""
    rows = len(examples)
    report = DataReport(
        rows, used=rows, rows_of={"random": rows}, sources={"random": ["random"]}, formats={"random": "ranking"}
    )
    data = SetData.of(examples, report, None)
    order = EpochOrder.plan(len(examples), 2, 0, 1.0, None)
    return _summary(data, data, byte_bpe(), DataConfig(template="none", max_length=64), None, order, "prompt")


def _summary(
    train: SetData,
    held_out: SetData | None,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    positions: int | None,
    order: EpochOrder,
    share: Share,
) -> DataSummary:
    model = SimpleNamespace(vocab_size=260, max_position_embeddings=positions)
    pack = PackConfig(tokens=2 * config.max_length, share=share)
    limits = PackLimits.plan(pack.tokens, share, compiled=False)
    known = model.max_position_embeddings
    return summarize(train, held_out, tokenizer, model, known, config, pack, order, limits, "a CPU")
