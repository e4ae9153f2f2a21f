"""A whole run of a model with short convolutions: from the folder to an export that plain transformers reads."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from tests.end_to_end.workbench import POSITIONS, VOCAB, job_in, make_tokenizer


def test_a_run_starts_at_a_margin_of_0_and_exports_what_it_learned(shelf: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], max_position_embeddings=POSITIONS,
        pad_token_id=0, bos_token_id=None, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    job = job_in(tmp_path, shelf).but(model={"path": tmp_path / "model"}, train={"max_steps": 3})
    outcome = job.done()
    assert "step-0 check: margin exactly 0 for 4 of 4 pairs" in outcome.out
    assert "causal_conv kernel plain" in outcome.out
    assert job.metrics()[0]["rewards/margin"] == 0.0
    exported = transformers.AutoModelForCausalLM.from_pretrained(job.run / "model")
    assert type(exported).__name__ == "Lfm2ForCausalLM"
    start, now = load_file(tmp_path / "model" / "model.safetensors"), job.exported()
    assert now.keys() == start.keys()
    for name in ("in_proj", "conv", "out_proj"):
        key = f"model.layers.2.conv.{name}.weight"
        assert now[key].shape == start[key].shape and not torch.equal(now[key], start[key])
