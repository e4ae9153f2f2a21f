"""`tuningfork train` on a GPU: weights from the disk to the export, and on from a checkpoint to the same bits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.workbench import make_model, make_pairs, write_rows
from tuningfork.models.hf.own import FAMILIES

pytestmark = pytest.mark.gpu
STEPS = 4
KINDS = {
    "float32 weights": {},
    "float16": {"model.dtype": "float16"},
    "float32, products in TF32": {"model.dtype": "float32", "model.tf32": "true"},
    "bfloat16 weights, 8-bit moments, offload": {
        "model.weights": "bfloat16",
        "train.optimizer": "adamw_8bit",
        "train.activation_memory": "offload",
    },
}
# Blocks so short that rows choose among them in most pairs.
MODELS = {
    "native sparse attention": {
        "kind": FAMILIES["tuningfork_nsa"].config, "head_dim": 16, "block_length": 4, "block_stride": 2,
        "select_length": 4, "select_count": 4, "window": 5,
    },
    "CCGQA": {"kind": FAMILIES["tuningfork_ccgqa"].config, "head_dim": 16},
}  # fmt: skip


def train(folder: Path, settings: dict[str, object], *options: str) -> str:
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "tuningfork.cli", "train", *flags, *options]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("kind", [*KINDS, *MODELS])
def test_a_run_and_its_continuation(tmp_path, kind):
    settings = KINDS.get(kind, {})
    if "train.optimizer" in settings:
        pytest.importorskip("torchao", reason="torchao is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, **MODELS.get(kind, {})}
    make_model(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    write_rows(tmp_path / "pairs.jsonl", make_pairs(40))
    job: dict[str, object] = {
        "model.path": "model",
        "data.train": "pairs.jsonl",
        "pack.tokens": 2048,
        "data.max_length": 256,
        "train.max_steps": STEPS,
        "train.examples_per_step": 8,
        "train.learning_rate": 1e-3,
        "train.device": "cuda",
        "output.save_every": 2,
        "output.export_dtype": "float32",
        **settings,
    }
    out = train(tmp_path, {**job, "output.dir": "whole"})
    assert (
        "step-0 check: margin exactly 0 for 8 of 8 pairs" in out
        and f"computing in {settings.get('model.dtype', 'bfloat16')}" in out
    )
    assert "start-up: " in out and "weights" in out
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[0]["rewards/margin"] == 0 < lines[-1]["rewards/margin"]

    # A run that was killed right after its checkpoint at step 2.
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{STEPS}")
    shutil.rmtree(tmp_path / "cut" / "model")
    config = tmp_path / "cut" / "config.yaml"
    config.write_text(config.read_text().partition("\n")[2].replace("whole", "cut"))
    assert "continuing from cut/checkpoints/step-2" in train(tmp_path, {**job, "output.dir": "cut"}, "--resume")
    # Held-out pairs scored after every step, in packs of other sizes: no graph is another for it, and no bit.
    write_rows(tmp_path / "held_out.jsonl", make_pairs(11, seed=5))
    watching = {"data.eval": "held_out.jsonl", "train.eval_every": 1, "output.dir": "watched"}
    out = train(tmp_path, {**job, **watching})
    assert all(f"\nstep {step}: held-out loss " in out for step in range(STEPS + 1))
    watched = load_file(tmp_path / "watched" / "model" / "model.safetensors")
    whole, cut = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert all(torch.equal(whole[name], watched[name]) for name in whole)
    lines = [json.loads(line) for line in (tmp_path / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == list(range(STEPS + 1))
