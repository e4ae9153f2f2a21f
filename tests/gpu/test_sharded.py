"""Weights spread by FSDP2 on a GPU: over one process with the bits of the plain path, over two with its log-probs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.worlds import environment, free_port
from tests.end_to_end.workbench import make_model, make_pairs, write_rows
from tests.tiny import random_examples, scorer_of, tiny_model
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.world import ALONE, world
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.step import train_step

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = [(9, (30, 40)), (5, (8, 60)), (17, (23, 20)), (2, (3, 100))]


def _steps(spread: bool, family: str, tokens: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    policy = Policy.fast(tiny_model(family, torch.float32).to(CUDA), torch.bfloat16)
    parallelize(policy, "none", compiled=True, layout=Layout(), always=spread)
    objective = ObjectiveConfig("simpo").build()
    limits = PackLimits.plan(tokens, "tree", compiled=True)
    scorer, found = scorer_of(policy, 256), []
    optimizer = build_optimizer(policy.model, TrainConfig(learning_rate=1e-3))
    for step in range(3):
        packs = build_packs(random_examples(SHAPES * 8, seed=step), limits)
        assert (len(packs) > 1) == (tokens == 1024)
        found.append(train_step(scorer, objective, optimizer, StepBatch.of(packs, objective, None), None).logps)
    weights = {n: getattr(w, "full_tensor", lambda w=w: w)().detach() for n, w in policy.model.named_parameters()}
    return found, weights


# Where embedding and head are one weight, a step of several packs adds their gradients up in another order.
@pytest.mark.parametrize(("family", "tokens"), [("llama", 1024), ("granite", 8192), ("olmo_hybrid", 1024)])
def test_over_one_process_all_bits_are_those_of_the_plain_path(family, tokens, monkeypatch):
    plain, weights = _steps(False, family, tokens)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    with world(ParallelConfig(), cuda=True, always=True):
        spread, spread_weights = _steps(True, family, tokens)
    assert [torch.equal(one, other) for one, other in zip(plain, spread, strict=True)] == [True] * 3
    assert [name for name, weight in weights.items() if not torch.equal(weight, spread_weights[name])] == []


def _command(out: str, *launcher: str) -> list[str]:
    settings = {
        "model.path": "model",
        "data.train": "pairs.jsonl",
        "pack.tokens": 2048,
        "data.max_length": 256,
        "train.epochs": 2,
        "train.max_steps": 8,
        "train.examples_per_step": 8,
        "train.learning_rate": 1e-3,
        "train.device": "cuda",
        "output.save_every": 2,
        "output.export_dtype": "float32",
        "reference.cache": f"cache-{out}",
        "output.dir": out,
    }
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return [sys.executable, *launcher, "-m", "tuningfork", "train", *flags]


def _start(folder: Path, out: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    command = _command(out, *launcher)
    return subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=280)


def _train(folder: Path, out: str, *launcher: str) -> list[dict]:
    done = _start(folder, out, *launcher)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "step-0 check: margin exactly 0 for 8 of 8 pairs" in done.stdout
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


def _launcher(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path / "model", hidden_size=64, intermediate_size=128, dtype=torch.bfloat16)
    write_rows(tmp_path / "pairs.jsonl", make_pairs(40))
    return tmp_path


def test_more_processes_than_gpus_are_refused(folder):
    done = _start(folder, "more", *_launcher(torch.cuda.device_count() + 1))
    assert done.returncode != 0
    assert done.stderr.count("have the same GPU") == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_processes_train_as_one(folder):
    one = _train(folder, "one")
    two = _train(folder, "two", *_launcher(2))
    exact = ("loss", "logps/chosen", "logps/rejected", "rewards/margin", "examples", "tokens")
    assert {key: one[0][key] for key in exact} == {key: two[0][key] for key in exact}
    assert two[0]["ranks"] == 2
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=0.02)  # bfloat16 products: weights differ in last bits
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=0.05)


def _by_two(folder: Path, out: str, *flags: str) -> list[subprocess.Popen[bytes]]:
    """The processes of a run on two GPUs."""
    port, running = free_port(), []
    for rank in range(2):
        with open(folder / f"{out}-said-{rank}.txt", "ab") as said:
            told = {"env": {**os.environ, **environment(rank, 2, port)}, "stdout": said, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen([*_command(out), *flags], cwd=folder, **told))
    return running


def _end(folder: Path, out: str, running: list[subprocess.Popen[bytes]]) -> None:
    """Wait for a run that comes to its end."""
    codes = [process.wait(280) for process in running]
    assert codes == [0, 0], [(folder / f"{out}-said-{rank}.txt").read_text()[-1000:] for rank in range(2)]


def _lines(folder: Path, out: str) -> list[dict]:
    path = folder / out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _killed_in_the_middle(folder: Path, out: str) -> None:
    """Train until some checkpoint is whole; then one process gets kill -9. The other waits in NCCL, and ends all the
    same, before parallel.timeout_minutes are over."""
    running, until = _by_two(folder, out), time.monotonic() + 200
    while len(_lines(folder, out)) < 5:
        assert time.monotonic() < until and all(process.poll() is None for process in running)
        time.sleep(0.01)
    running[1].kill()
    assert [process.wait(120) for process in running] == [2, -signal.SIGKILL]
    assert "of the run has ended" in (folder / f"{out}-said-0.txt").read_text()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_that_is_killed_goes_on_to_the_same_bits_and_on_one_gpu_to_nearly_these(folder):
    _end(folder, "whole", _by_two(folder, "whole"))
    _killed_in_the_middle(folder, "killed")
    shutil.copytree(folder / "killed", folder / "as-killed")
    _end(folder, "killed", _by_two(folder, "killed", "--resume"))
    (folder / "killed").rename(folder / "by-two")
    (folder / "as-killed").rename(folder / "killed")
    assert subprocess.run([*_command("killed"), "--resume"], cwd=folder, timeout=280).returncode == 0

    runs = ("whole", "by-two", "killed")
    whole, same, near = (load_file(folder / out / "model" / "model.safetensors") for out in runs)
    assert [name for name in whole if not torch.equal(whole[name], same[name])] == []
    for name, weight in whole.items():
        assert (near[name] - weight).norm() < 0.02 * weight.norm(), name  # bfloat16 products: other last bits
    for line, equal, other in zip(*(_lines(folder, out) for out in runs), strict=True):
        assert (line["loss"], line["grad_norm"]) == (equal["loss"], equal["grad_norm"])
        assert (line["step"], line["examples"], line["tokens"]) == (other["step"], other["examples"], other["tokens"])
        assert other["loss"] == pytest.approx(line["loss"], rel=0.02)
