"""Every objective and every way to compute runs through the whole trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.end_to_end.workbench import Job

LN_2 = math.log(2)


@pytest.mark.parametrize(
    "settings, first_loss",
    [
        ({"name": "dpo", "beta": 0.5}, LN_2),
        ({"name": "dpo", "label_smoothing": 0.2}, LN_2),
        ({"name": "dpo_norm", "beta": 2.0}, LN_2),
        ({"name": "ipo", "beta": 0.1}, 25.0),
        ({"name": "ipo_sum", "beta": 0.2}, 6.25),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else "",
)
def test_a_loss_with_a_reference_starts_at_its_value_for_margin_zero(
    job: Job, filled_cache: Any, settings: dict[str, Any], first_loss: float
) -> None:
    """ln 2 for the sigmoid losses, (1 / 2 beta)^2 for the identity ones; then training raises the margin."""
    job = job.but({"reference.cache": filled_cache, "train.epochs": 2}, objective=settings)
    job.done()
    lines = job.metrics()
    assert lines[0]["loss"] == pytest.approx(first_loss, rel=1e-14)
    assert lines[0]["rewards/margin"] == 0.0
    assert lines[-1]["rewards/margin"] > 0 and lines[-1]["loss"] < first_loss


def test_simpo_runs_without_a_reference(job: Job) -> None:
    """Rewards are beta x mean log-prob; no cache, no step-0 check; the margin grows."""
    job = job.but({"reference.cache": None, "train.epochs": 2}, objective={"name": "simpo", "beta": 2.0, "gamma": 1.0})
    assert "step-0" not in job.done().out
    lines = job.metrics()
    assert lines[0]["rewards/chosen"] < 0 and lines[-1]["rewards/margin"] > lines[0]["rewards/margin"]
    assert not (job.folder / "cache").exists()


def test_the_sft_term_is_added_to_the_loss(job: Job, filled_cache: Any) -> None:
    """ln 2 plus the weight times the mean negative log-prob over the chosen tokens."""
    job = job.but({"reference.cache": filled_cache, "objective.sft_weight": 0.3, "train.examples_per_step": 40})
    plain = job.elsewhere("plain").but({"objective.sft_weight": 0.0})
    job.done(), plain.done()
    (line,), (without,) = job.metrics(), plain.metrics()
    assert without["loss"] == pytest.approx(LN_2, rel=1e-15)
    nll = (line["loss"] - LN_2) / 0.3  # per chosen token
    chosen_tokens = -line["logps/chosen"] * 40 / nll
    assert chosen_tokens == pytest.approx(round(chosen_tokens), abs=1e-6)
    assert 0 < round(chosen_tokens) < line["answer_tokens"]


def test_activation_memory_trains_the_same_weights(job: Job, filled_cache: Any) -> None:
    """What is kept for the backward pass, and where, changes the memory, not the result."""
    job = job.but({"reference.cache": filled_cache})
    assert "auto is none on a CPU" in job.but({"train.activation_memory": "auto"}).done().out
    theirs = job.exported()
    for mode in ("block", "offload"):
        job.elsewhere(mode).but({"train.activation_memory": mode}).done()
        ours = job.elsewhere(mode).exported()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


def test_bfloat16_on_a_cpu_is_exact_at_step_0_and_learns(job: Job) -> None:
    """Policy and reference round alike: the margin of step 1 is exactly 0, whatever packs the cache was built from."""
    job = job.but({"model.dtype": "bfloat16", "train.epochs": 3, "train.learning_rate": 3e-3})
    job.but({"pack.tokens": 1024}).done("reference")
    assert "computing in bfloat16" in job.done().out
    lines = job.metrics()
    assert lines[0]["rewards/margin"] == 0.0 and lines[0]["loss"] == pytest.approx(LN_2, rel=1e-15)
    assert lines[-1]["rewards/margin"] > 1
    assert {weight.dtype for weight in job.exported().values()} == {torch.float32}


def test_weight_tying_survives_training_and_export(job: Job) -> None:
    """Tied embeddings stay tied: one tensor in the file, and the exported model gives the trained logits."""
    from transformers import AutoModelForCausalLM

    from tests.end_to_end.workbench import make_model

    make_model(job.folder / "tied", tie_word_embeddings=True)
    job = job.but({"model.path": job.folder / "tied"})
    job.done()
    assert "lm_head.weight" not in job.exported()
    model = AutoModelForCausalLM.from_pretrained(job.run / "model")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, job.exported()["model.embed_tokens.weight"])
    job.but({"data.eval": job.settings["data.train"]}).done("eval")


def test_plain_text_without_a_template(job: Job, shelf: Any) -> None:
    """template none trains on prompt + answer as they are, with the end token behind each answer."""
    job = job.but({"data.template": "none"})
    job.done()
    assert job.metrics()[0]["rewards/margin"] == 0.0 and len(job.metrics()) == 10


def test_the_seed_changes_the_order_and_nothing_else(job: Job, filled_cache: Any) -> None:
    """The same seed twice gives the same bits; another seed gives another first step of the same epoch."""
    job = job.but({"reference.cache": filled_cache})
    job.done(), job.elsewhere("twin").done(), job.elsewhere("other").but({"train.seed": 1}).done()
    twin, other = job.elsewhere("twin"), job.elsewhere("other")
    assert all(torch.equal(weight, job.exported()[name]) for name, weight in twin.exported().items())
    assert other.metrics()[0]["tokens"] != job.metrics()[0]["tokens"]
    assert sum(line["tokens"] for line in other.metrics()) == sum(line["tokens"] for line in job.metrics())
