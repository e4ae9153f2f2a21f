"""A whole run of a model with native sparse attention: DPO from a margin of 0 to an export that has its own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.workbench import POSITIONS, VOCAB, job_in, make_tokenizer
from tuningfork.models.nsa import NsaConfig, NsaForCausalLM
from tuningfork.objective.pairs import DPO
from tuningfork.report.run.metrics import OF_NSA, training_definitions


def test_a_run_starts_at_a_margin_of_0_and_exports_what_it_learned(shelf: Path, tmp_path: Path) -> None:
    """Its reference is scored in other packs than it trains on; sequences are long enough to choose blocks. Gates begin
    as they are seldom wanted, all but shut onto the window, and three steps later the run says so."""
    torch.manual_seed(0)
    config = NsaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        block_length=4, block_stride=2, select_length=4, select_count=4, window=5, max_position_embeddings=POSITIONS,
        pad_token_id=0, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    model, logits = NsaForCausalLM(config), (-4.0, -5.0, 4.0)
    for layer in model.model.layers:
        layer.self_attn.gate.bias.data = torch.tensor(logits).repeat(config.num_attention_heads)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    job = job_in(tmp_path, shelf).but(model={"path": tmp_path / "model"}, train={"max_steps": 3})
    outcome = job.done()
    assert "step-0 check: margin exactly 0 for 4 of 4 pairs" in outcome.out
    assert "nsa kernel plain" in outcome.out
    first = job.metrics()[0]
    assert first["rewards/margin"] == 0.0
    assert list(first) == list(training_definitions({**DPO.statistics_defined, **OF_NSA}))
    gates = torch.tensor(logits).sigmoid()
    assert [first[f"nsa/gate_{branch}"] for branch in ("cmp", "slc", "win")] == pytest.approx(gates.tolist(), rel=1e-5)
    assert first["nsa/gate_entropy"] == pytest.approx(float(torch.special.entr(gates / gates.sum()).sum()), rel=1e-5)
    shut = "! after step 3, the gates of native sparse attention have collapsed onto the window: "
    assert outcome.out.count(shut) == outcome.out.count("have collapsed") == 1
    exported = NsaForCausalLM.from_pretrained(job.run / "model")
    assert exported.config.select_count == 4 and (job.run / "model" / "modeling_nsa.py").exists()
    start, now = load_file(tmp_path / "model" / "model.safetensors"), job.exported()
    assert now.keys() == start.keys()
    for name in ("k_slc.weight", "v_win.weight", "phi_k.inner", "phi_v.outer", "gate.weight"):
        key = f"model.layers.1.self_attn.{name}"
        assert now[key].shape == start[key].shape and not torch.equal(now[key], start[key])
