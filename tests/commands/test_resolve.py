"""Settings with all that they leave open, and what is refused before a model is made, fetched or read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.hf.folders import folder_of
from tests.tiny import CCGQA, SPARSE
from tuningfork.commands.resolve import located
from tuningfork.errors import ConfigError
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Console

MADE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def config_of(folder: Path, **model: Any) -> RunConfig:
    given = {f"model.{name}": value for name, value in model.items()}
    return RunConfig.of({"output.dir": str(folder / "run"), "parallel.tensor": 2, **given})


@pytest.mark.parametrize("family", [*SPARSE, *CCGQA])
def test_a_model_without_a_plan_is_not_split_also_on_one_process_and_before_weights_are_read(
    tmp_path: Path, family: str
) -> None:
    folder = folder_of(tmp_path / "model", family)
    (folder / "model.safetensors").write_bytes(b"none that could be read")
    with pytest.raises(ConfigError, match=r"parallel\.tensor is 2, but \w+ForCausalLM has no plan .* Set it to 1\."):
        located(config_of(tmp_path, path=str(folder)), Console())


@pytest.mark.parametrize("kind", ["tuningfork_nsa", "tuningfork_ccgqa"])
def test_a_model_without_a_plan_is_not_made_to_be_split(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, init={"model_type": kind, **MADE, "num_key_value_heads": 2}, tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"parallel\.tensor is 2, but \w+ForCausalLM has no plan"):
        located(config, Console())
    assert not (tmp_path / "run").exists()


def test_a_model_with_a_plan_is_located_as_without_parallel_tensor(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama")
    assert located(config_of(tmp_path, path=str(folder)), Console())[0].model.path == str(folder)
