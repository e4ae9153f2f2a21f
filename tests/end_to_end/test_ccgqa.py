"""A whole run of a CCGQA model: from the folder to an export that carries its own class."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.end_to_end.workbench import POSITIONS, VOCAB, job_in, make_tokenizer
from tuningfork.models.ccgqa.modeling_ccgqa import CcgqaConfig, CcgqaForCausalLM


def test_a_run_starts_at_a_margin_of_0_and_exports_what_it_learned(shelf: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CcgqaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, depthwise_kernel_size=3, max_position_embeddings=POSITIONS,
        pad_token_id=0, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    CcgqaForCausalLM(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    job = job_in(tmp_path, shelf).but(model={"path": tmp_path / "model"}, train={"max_steps": 3})
    outcome = job.done()
    assert "step-0 check: margin exactly 0 for 4 of 4 pairs" in outcome.out
    assert "ccgqa kernel plain" in outcome.out
    assert job.metrics()[0]["rewards/margin"] == 0.0
    assert (job.run / "model" / "modeling_ccgqa.py").is_file()
    start, now = load_file(tmp_path / "model" / "model.safetensors"), job.exported()
    assert now.keys() == start.keys()
    for name in ("temperature", "depthwise_weight", "grouped_weight", "grouped_bias", "v_proj.weight"):
        key = f"model.layers.1.self_attn.{name}"
        assert now[key].shape == start[key].shape and not torch.equal(now[key], start[key])
