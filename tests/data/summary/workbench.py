"""Small files of pairs and what is counted of them, by tokenizers of which every id is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.data.audit import prepare
from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.loader import EpochOrder
from tuningfork.data.pack import PackLimits
from tuningfork.data.summary.file import FileData, read_too_long
from tuningfork.data.summary.summarize import DataSummary, summarize
from tuningfork.records import DataReport, TokenExample


def pair(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> FileData:
    examples, report = prepare(path, tokenizer, config, 260)
    return FileData(path, examples, read_too_long(path, tokenizer, config, report), report)


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
    share_prompt: bool = True,
) -> DataSummary:
    """The summary of some rows; one token a byte unless another tokenizer is given."""
    tokenizer = tokenizer or byte_bpe()
    config = DataConfig(template=template, max_length=max_length)  # type: ignore[arg-type]
    train = read(write(folder / "train.jsonl", rows), tokenizer, config)
    other = None if held_out is None else read(write(folder / "eval.jsonl", held_out), tokenizer, config)
    order = EpochOrder.plan(len(train.examples), per_step, 0, epochs, None)
    return _summary(train, other, tokenizer, config, positions, order, share_prompt)


def summary_of_examples(examples: Sequence[TokenExample]) -> DataSummary:
    """The summary of examples of any number of answers."""
    data = FileData("random", examples, [], DataReport(len(examples), len(examples), []))
    order = EpochOrder.plan(len(examples), 2, 0, 1.0, None)
    return _summary(data, data, byte_bpe(), DataConfig(template="none", max_length=64), None, order, True)


def _summary(
    train: FileData,
    held_out: FileData | None,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    positions: int | None,
    order: EpochOrder,
    share_prompt: bool,
) -> DataSummary:
    model = SimpleNamespace(vocab_size=260, max_position_embeddings=positions)
    pack = PackConfig(tokens=2 * config.max_length, share_prompt=share_prompt)
    limits = PackLimits.plan(pack.tokens, share_prompt, compiled=False)
    return summarize(train, held_out, tokenizer, model, config, pack, order, limits)
