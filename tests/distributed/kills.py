"""A run whose processes are killed at random moments, and which goes on each time: its end is that of one never killed.

python -m tests.distributed.kills --kills 100 --processes 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.distributed.worlds import environment, free_port
from tests.end_to_end.workbench import make_model, make_pairs, write_rows
from tuningfork import cli

STEPS = 12
TIMED = ("step_s", "data_s", "_per_s", "_per_rank", "slowest_pace", "gather_wait", "seconds", "crc32")


def prepared(folder: Path) -> None:
    """A model and pairs to train it on."""
    make_model(folder / "model")
    write_rows(folder / "pairs.jsonl", make_pairs(40))
    write_rows(folder / "held_out.jsonl", make_pairs(6, seed=3))


def start(folder: Path, out: str, size: int, resume: bool, **told: str) -> list[Any]:
    """The processes of a run, forked from this one, which are `told` so in their environment."""
    port, context, processes = free_port(), multiprocessing.get_context("fork"), []
    for rank in range(size):
        process = context.Process(target=_train, args=(folder, out, resume, environment(rank, size, port) | told))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        processes.append(process)
    return processes


def finished(processes: list[Any], seconds: float = 120.0) -> list[int]:
    """How the processes ended. Raises AssertionError where one hangs."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"ranks {hanging} hang"
    return [process.exitcode for process in processes]


def _ended_as_by_a_launcher(processes: list[Any]) -> None:
    """The others of a run that has lost one: most end by themselves; as a launcher does, those that still wait for it
    are asked to end, and killed. So a kill at any moment ends all within a bounded time."""
    for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if signal_number is not None and process.is_alive():
                os.kill(process.pid, signal_number)
        until = time.monotonic() + 4.0
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))


def killed_again_and_again(folder: Path, out: str, size: int, kills: int, seed: int) -> int:
    """Train with so many kills of a random rank at a random moment, each followed by --resume, until the run has ended;
    it begins anew in another folder where it ends too early. The kills that hit a living process."""
    draw, done, number = random.Random(seed), 0, 0
    length = 3.0  # seconds, about, of a run that nobody kills
    while done < kills:
        name, number, resume = f"{out}-{number}", number + 1, False
        while True:
            begun = time.monotonic()
            processes = start(folder, name, size, resume)
            victim = draw.randrange(size)
            delay = draw.uniform(0.1, 1.1) * length if done < kills else 60.0
            processes[victim].join(delay)
            if processes[victim].is_alive():
                os.kill(processes[victim].pid, signal.SIGKILL)
                done += 1
                _ended_as_by_a_launcher(processes)
                resume = (folder / name / "config.yaml").exists()
                continue
            codes = finished(processes)
            assert codes == [0] * size, (codes, (folder / name / "log.txt").read_text()[-2000:])
            length = min(length, time.monotonic() - begun) if not resume else length
            break
        assert_same(folder / name, folder / "whole")
        print(f"{done} kills, {number} runs: the bits of the run that nobody killed", flush=True)
    return done


def assert_same(run: Path, other: Path) -> None:
    """Exported weights and lines of metrics are equal, but for times."""
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [_lines(folder / "metrics.jsonl") for folder in (run, other)]
    assert lines[0] == lines[1]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in found]


def _arguments(out: str) -> list[str]:
    """Of the command line, in the folder that is `prepared`."""
    settings = {
        "model.path": "model",
        "data.train": "pairs.jsonl",
        "data.eval": "held_out.jsonl",
        "data.max_length": 256,
        "pack.tokens": 512,
        "train.max_steps": STEPS,
        "train.examples_per_step": 8,
        "train.learning_rate": 1e-3,
        "train.eval_every": 5,
        "train.device": "cpu",
        "output.save_every": 2,
        "output.export_dtype": "float32",
        "output.sinks": "[]",
        "output.dir": out,
        "parallel.timeout_minutes": 0.5,
    }
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ["train", *flags]


def train(folder: Path, out: str, resume: bool = False) -> int:
    """What a process does that has been told which one it is: its exit status."""
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(folder / f"{out}-said-{os.environ['RANK']}.txt", "a")  # noqa: SIM115
    code = cli.main([*_arguments(out), *(["--resume"] if resume else [])])
    sys.stdout.flush()
    return code


def _train(folder: Path, out: str, resume: bool, surroundings: dict[str, str]) -> None:
    os.environ.update(surroundings)
    os._exit(train(folder, out, resume))  # as a process of its own ends, without what this one has still to do


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(folder)
        assert finished(start(folder, "whole", asked.processes, False)) == [0] * asked.processes
        done = killed_again_and_again(folder, "killed", asked.processes, asked.kills, asked.seed)
    print(f"{done} kills of a random one of {asked.processes} processes: weights and numbers to the bit")


if __name__ == "__main__":
    main()
