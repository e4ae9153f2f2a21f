"""Whole runs of a model with a recurrence: from the folder to the export, killed and resumed."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.end_to_end.test_resume import die_in
from tests.end_to_end.workbench import POSITIONS, VOCAB, Child, Job, assert_same_state, job_in, make_tokenizer, state_of
from tests.tiny import one_pack, random_examples, score_alone, scorer_of
from tuningfork.kernels.select import plain
from tuningfork.models.hf.load import load
from tuningfork.models.policy import Policy

STEPS = 5


@pytest.fixture(scope="module")
def hybrid(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A tiny OLMo Hybrid, and a run of five steps from it that nothing interrupts."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    config = transformers.OlmoHybridConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
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


def test_log_probs_of_the_export_are_those_of_plain_transformers(hybrid: Job) -> None:
    """Of the model as it has learnt, in packs and trees here and each sequence alone there."""
    exported = transformers.AutoModelForCausalLM.from_pretrained(hybrid.run / "model").eval()
    ours = Policy(load(str(hybrid.run / "model")).model.float(), plain(), torch.float32)
    examples = random_examples([(9, (30, 40)), (70, (3, 61)), (0, (64,))], vocab=VOCAB)
    theirs = torch.stack([logp for example in examples for logp in score_alone(exported, example)])
    found = scorer_of(ours).score(one_pack(examples, "tree", tokens=1024))
    torch.testing.assert_close(found.float(), theirs.float(), rtol=1e-5, atol=1e-5)


def test_a_run_that_is_killed_ends_in_the_bits_of_one_that_is_not(hybrid: Job) -> None:
    again = hybrid.elsewhere("again")
    assert Child(again.arguments("train"), again.folder, partial(die_in, 4)).wait().status == -signal.SIGKILL
    again.done("train", "--resume")
    assert_same_state(again, hybrid, STEPS)


def test_a_reference_of_another_process_and_of_other_packs_is_exact(hybrid: Job) -> None:
    """An empty cache, filled by a process that has computed nothing before, in packs of another size and order."""
    job = hybrid.elsewhere("afar").but({"reference.cache": hybrid.folder / "cache-of-another"})
    others = job.but({"pack.tokens": 4096, "train.seed": 5, "train.examples_per_step": 7})
    assert Child(others.arguments("reference"), others.folder).wait().status == 0
    out = job.done().out
    assert "step-0 check: margin exactly 0 for 4 of 4 pairs" in out and "scoring the reference" not in out
    assert_same_state(job, hybrid, STEPS)


def test_narrow_weights_and_moments_leave_decays_and_norms_wide(hybrid: Job) -> None:
    """Decays add up along a chunk: A_log, dt_bias and norms keep the digits of float32, in checkpoints too."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    narrow = {"model.dtype": "bfloat16", "model.weights": "bfloat16", "train.optimizer": "adamw_8bit"}
    job = hybrid.elsewhere("narrow").but(narrow)
    job.done()
    assert job.metrics()[0]["rewards/margin"] == 0.0
    assert job.metrics()[-1]["loss"] < job.metrics()[0]["loss"]
    state = state_of(job.run / "checkpoints" / f"step-{STEPS}")
    narrow_ones = {
        name for name, weight in state.items() if name.startswith("model.") and torch.equal(weight, weight.bfloat16())
    }
    # Of a model this small the MLPs alone have matrices so large that 8 bits serve their moments.
    mlps = {f"model.model.layers.{n}.mlp.{part}_proj.weight" for n in range(4) for part in ("gate", "up", "down")}
    assert narrow_ones == mlps


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
