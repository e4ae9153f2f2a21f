"""The library's front door: what a program does with tuningfork that does not want the whole of `tuningfork train`.

Each function is a few lines over the rooms that do the work; docs/api.md shows them in use. Every error that a caller
can cause is one of tuningfork/errors.py and says what to do.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tuningfork.accounts import DataReport
from tuningfork.commands.train import train
from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.data.prepare import prepare_examples
from tuningfork.models.config import ModelConfig
from tuningfork.models.hf import attention
from tuningfork.models.hf.load import Loaded, load
from tuningfork.models.hf.support import check_config, check_modules
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.models.split_k import choose_library
from tuningfork.objective.pairs import DPO
from tuningfork.recipe.load import load_run_config
from tuningfork.recipe.run_config import RunConfig
from tuningfork.records import PackedBatch, TokenExample
from tuningfork.reference.config import ReferenceConfig
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.console import Console
from tuningfork.train.checks.head_check import check_head
from tuningfork.train.checks.self_check import check_packed_equals_alone
from tuningfork.train.session import Session
from tuningfork.train.setup import reference as reference_setup
from tuningfork.train.setup.device import choose_device, choose_dtype


def read_examples(
    sources: str | Path | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig | None = None,
    vocab_size: int | None = None,
) -> tuple[Sequence[TokenExample], DataReport]:
    """Read and tokenize preference files, as `data.train` names them.

    Args:
        config: the `data` settings of a recipe; its sources are not read.
        vocab_size: rows of the model's embedding; None takes the tokenizer's.

    Returns:
        The examples, and what became of every row.

    Raises:
        DataError: a source or the tokenizer are unfit, or no row is left.
    """
    config = (config or DataConfig()).with_day(None)
    return prepare_examples(sources, tokenizer, config, vocab_size or len(tokenizer))


def pack(examples: Sequence[TokenExample], tokens: int = 8192, share: Share = "tree") -> list[PackedBatch]:
    """Lay examples side by side into packs of at most `tokens` tokens. Each has a multiple of 64 token slots.

    Args:
        share: what is laid once: tree, whatever examples begin with in common; prompt, each prompt for all its
            answers; none, nothing. Log-probs are the same to the bit.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    return build_packs(examples, PackLimits.plan(tokens, share, compiled=False))


def build_scorer(
    model: str | Path | PreTrainedModel,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    chunk_rows: int = 4096,
) -> Scorer:
    """A scorer of a model, which is checked as at the start of a run: packed examples must equal the same ones alone.

    Args:
        model: a Hugging Face folder, or a causal language model of transformers in memory. That is given our
            attention, and stays on its device.
        device: where a folder's model goes; None takes a GPU if there is one.
        dtype: of matrix products; None takes bfloat16 on a GPU, float32 else.
        chunk_rows: logit rows that the head projects at once.

    Raises:
        ModelError: it cannot be loaded, or packing it would not be exact.
    """
    if isinstance(model, PreTrainedModel):
        name = type(model).__name__
        check_config(model.config, name)
        model.set_attn_implementation(attention.NAME)
        check_modules(model, name)
        model.train()  # one mode for scoring and training, so that both run the same code
    else:
        name = str(model)
        model = load(name, choose_device("auto") if device is None else torch.device(device)).model
    dtype = dtype or choose_dtype(ModelConfig(), model.device)
    choose_library(model.device, dtype, exact=True)
    check_packed_equals_alone(model, name)
    scorer = Scorer.of(Policy.fast(model, dtype), chunk_rows)
    check_head(scorer, name)
    return scorer


def open_reference(
    scorer: Scorer, examples: Sequence[TokenExample], cache: str | Path, tokens: int = 8192, share: Share = "tree"
) -> ReferenceStore:
    """The log-probs of a model as it is now, from the cache folder, where missing ones are scored and kept.

    Use it before the first step moves a weight. `ReferenceStore.lookup(examples)` gives float64 [A], all answers in
    order.

    Raises:
        ReferenceMismatch: the cache holds other log-probs than the model has now.
    """
    config = RunConfig(pack=PackConfig(tokens, share), reference=ReferenceConfig(str(cache)))
    model = scorer.policy.model
    session = Session(scorer, DPO(), Loaded(model, model.dtype))
    limits = PackLimits.plan(tokens, share, session.compiled)
    return reference_setup.open_reference(config, session, examples, limits, Console(io.StringIO()))


def load_recipe(path: str | Path | None = None, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """The checked settings of a run: defaults, then a recipe's, then these, by dotted key.

    Raises:
        ConfigError: a setting is unknown, out of bounds, or contradicts another.
    """
    given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (settings or {}).items()}
    flags = [text for key, value in given.items() for text in (f"--{key}", value)]
    return load_run_config(None if path is None else Path(path), flags, "tuningfork")


def run_recipe(config: RunConfig, resume: bool = False) -> Path:
    """Do what `tuningfork train` does, with its words on the terminal.

    Returns:
        The run folder; the trained model lies in its folder `model`.

    Raises:
        KeyboardInterrupt: the user asked to stop. What was saved can be continued.
        TuningforkError: see its kinds.
    """
    if train(config, resume) != 0:
        raise KeyboardInterrupt(
            f"stopped as asked; continue with run_recipe(config, resume=True) in {config.output.dir}"
        )
    return Path(config.output.dir)
