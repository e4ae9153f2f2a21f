"""Models from nothing by the names of their recipes, and documents of random ids for them.

A recipe's tokenizer and text are not needed: speed does not depend on what is written, only on lengths and sizes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from tuningfork.models.hf import own  # noqa: F401  model types of our own have a name from here on
from tuningfork.recipe.load import load_run_config
from tuningfork.recipe.run_config import RunConfig
from tuningfork.records import Source, TokenAnswer, TokenExample

_FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES: dict[str, Path] = {
    path.stem: path for path in (_FOLDER / "scratch-tiny.yaml", *sorted((_FOLDER / "scratch").glob("*.yaml")))
}
BYTES_VOCABULARY = 320
"""What a model of bytes has where its recipe does not say: 259 ids, up to the next multiple of 64."""


@cache
def recipe(name: str) -> RunConfig:
    """The settings of a recipe."""
    return load_run_config(RECIPES[name], [], "bench")


def twin(name: str) -> str | None:
    """The recipe of the same model with plain attention; None where there is none."""
    return f"{name}-dense" if f"{name}-dense" in RECIPES else None


def settings(name: str, positions: int = 0) -> dict[str, Any]:
    """What a config.json of the recipe's model holds; it knows at least so many positions."""
    init = recipe(name).model.init
    assert isinstance(init, dict), f"{name} has no model.init"
    longest = max(init["max_position_embeddings"], positions)
    return {"vocab_size": BYTES_VOCABULARY, **init, "max_position_embeddings": longest}


def config(name: str, layers: int | None = None, positions: int = 0) -> Any:
    """The transformers config of a recipe's model, or of so many of its first blocks."""
    given = settings(name, positions)
    if layers is not None:
        given["num_hidden_layers"] = layers
    return AutoConfig.for_model(given.pop("model_type"), **given)


def documents(count: int, length: int, vocabulary: int, seed: int = 0) -> list[TokenExample]:
    """Documents of random ids, each of `length` tokens, all of which but the first are predicted."""
    ids = np.random.default_rng(seed).integers(0, vocabulary, (count, length), np.int32)
    counts = np.ones(length - 1, bool)
    return [
        TokenExample(Source("random", row), of_row[:1], (TokenAnswer(of_row[1:], counts),))
        for row, of_row in enumerate(ids, start=1)
    ]
