"""Whole runs of a model with a recurrence: from the folder to the export, crashed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.end_to_end.test_resume import crash
from tests.end_to_end.workbench import POSITIONS, VOCAB, Job, assert_same_state, job_in, make_tokenizer

STEPS = 5


@pytest.fixture(scope="module")
def hybrid(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A tiny OLMo Hybrid, and a run of five steps from it that nothing interrupts."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    config = transformers.OlmoHybridConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
        max_position_embeddings=POSITIONS, rope_parameters={"rope_theta": None},
        pad_token_id=0, bos_token_id=None, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    job = job_in(folder, shelf).but(
        model={"path": folder / "model"},
        data={"eval": shelf / "held_out.jsonl"},
        train={"max_steps": STEPS},
        output={"save_every": 2},
    )
    outcome = job.done()
    assert "step-0 check: margin exactly 0 for 4 of 4 pairs" in outcome.out
    assert "causal_conv kernel plain" in outcome.out and "gated_delta kernel plain" in outcome.out
    return job


def test_a_run_learns_and_exports_a_model_that_plain_transformers_reads(hybrid: Job) -> None:
    assert hybrid.metrics()[0]["rewards/margin"] == 0.0
    assert hybrid.metrics()[-1]["loss"] < hybrid.metrics()[0]["loss"]
    exported = transformers.AutoModelForCausalLM.from_pretrained(hybrid.run / "model")
    assert type(exported).__name__ == "OlmoHybridForCausalLM"
    start = load_file(Path(hybrid.settings["model.path"]) / "model.safetensors")
    now = hybrid.exported()
    for name in ("A_log", "dt_bias", "o_norm.weight", "q_proj.weight", "o_proj.weight"):
        key = f"model.layers.1.linear_attn.{name}"
        assert now[key].shape == start[key].shape and not torch.equal(now[key], start[key])
    assert [len(now[f"model.layers.1.linear_attn.{part}_conv1d.weight"]) for part in "qkv"] == [16, 16, 64]


def test_a_run_that_crashed_ends_in_the_bits_of_one_that_did_not(hybrid: Job) -> None:
    again = hybrid.elsewhere("again")
    crash(again, step=4)
    again.done("train", "--resume")
    assert_same_state(again, hybrid, STEPS)


@pytest.mark.parametrize("activations", ["block", "offload"])
def test_recomputed_blocks_change_no_bit(hybrid: Job, activations: str) -> None:
    other = hybrid.elsewhere(activations).but({"train.activation_memory": activations})
    other.done()
    assert_same_state(other, hybrid, STEPS)


def test_the_exported_model_is_evaluated(hybrid: Job) -> None:
    hybrid.done("eval")
    [found] = (hybrid.run / "evaluations").iterdir()
    assert json.loads(found.read_text())["scores"]["rewards/accuracy"] >= 0.5


def test_blocks_with_plain_scans_are_not_compiled(hybrid: Job) -> None:
    message = hybrid.elsewhere("compiled").but({"model.compile": "on"}).refused()
    assert "causal_conv and gated_delta run in plain PyTorch on cpu" in message
    assert "Set model.compile to auto, or to off" in message
