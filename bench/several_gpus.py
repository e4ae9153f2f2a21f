"""Training on all GPUs of this machine, way by way, beside as many programs of one GPU each; JSON lines, then a table.

Each job is bench.step in processes of its own. `alone` runs one on every GPU at once, each for itself: a machine's GPUs
share its power and its processors, so that is what a job of them all is measured against.

    ratio           pairs/s of all GPUs together / that of the programs of `alone` together, of the same model and as
                    many pairs a GPU and step
    tokens_gpu      tokens a second and GPU, padding and repeats not counted
    exposed_ms      of a step, in which a GPU only talks to others (with --profile)
    step0           pairs whose log-probs were equal to the reference's to the bit, on every process

    python -m bench.several_gpus
    python -m bench.several_gpus --jobs alone spread kept --limit 120
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.output import device, emit, environment, parser, table

SMALL = torch.cuda.device_count() == 0
MODEL, WIDE, HYBRID = ("tiny", "tiny", "tiny_hybrid") if SMALL else ("olmo2_1b", "olmo2_7b", "olmo_hybrid_7b")
PAIRS, EACH = (8, 4) if SMALL else (256, 16)  # of a process: in all, and of a step
PACK = 8192 if SMALL else 16384
COLUMNS = {
    "job": "job",
    "gpus": "GPUs",
    "model": "model",
    "pairs_s": "pairs/s",
    "ratio": "ratio",
    "tokens_gpu": "tokens/s/GPU",
    "mfu": "MFU",
    "median_step_s": "median step s",
    "peak_gib": "GiB",
    "exposed_ms": "exposed ms",
    "activation_memory": "activations",
    "step0": "exact at 0",
    "note": "note",
}


class Job(NamedTuple):
    """A way to train: a model, and what bench.step is told besides how many pairs there are."""

    model: str
    flags: tuple[str, ...] = ()
    least: int = 2  # GPUs that it takes
    epochs: int = 4
    each: int = EACH  # pairs of a GPU and step

    @property
    def alone(self) -> bool:
        """Whether each GPU runs a program of its own."""
        return self.least == 1

    def measures(self, other: Job) -> bool:
        """Whether another is to be held against it."""
        return self.alone and (self.model, self.each) == (other.model, other.each)


def jobs(gpus: int) -> dict[str, Job]:
    """By name, in their order. Moments of 7B in 8 bits over weights in bfloat16, where fewer than four GPUs hold it."""
    held = () if gpus >= 4 or SMALL else ("--weights", "bfloat16", "--optimizer", "adamw_8bit")
    auto = (*held, "--activation_memory", "auto")
    sizes = (PACK // 4, PACK, 2 * PACK)
    return {
        "alone": Job(MODEL, least=1),
        "spread": Job(MODEL),
        "kept": Job(MODEL, ("--no-reshard_after_forward",)),
        "copies": Job(MODEL, ("--shard", "1")),
        "alone, more packs": Job(MODEL, least=1, each=4 * EACH),
        "spread, more packs": Job(MODEL, each=4 * EACH),
        "kept, more packs": Job(MODEL, ("--no-reshard_after_forward",), each=4 * EACH),
        "copies of what is spread": Job(MODEL, ("--replicate", "2"), least=4),
        "sums in bfloat16": Job(MODEL, ("--reduce_dtype", "bfloat16")),
        "tensor": Job(MODEL, ("--tensor", "2")),
        **{f"7B, packs of {rows}": Job(WIDE, (*auto, "--pack_tokens", str(rows)), epochs=2) for rows in sizes},
        "7B, hybrid": Job(HYBRID, auto, epochs=2),
    }


def command(job: Job, processes: int, pairs: int, out: Path, profile: Path | None) -> list[str]:
    """One program of so many processes; tensor groups of two share their examples."""
    start = ["-m", "bench.step"]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *start]
    told = {"model": job.model, "pairs": max(pairs, job.each) * processes, "examples_per_step": job.each * processes}
    told |= {"epochs": job.epochs, "pack_tokens": PACK, "out": out} | ({"profile": profile} if profile else {})
    flags = [text for name, value in told.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-W", "ignore", *start, *flags, *job.flags]


def run(commands: Sequence[list[str]], each_its_own: bool, limit: float) -> str:
    """Start programs at once and wait for all; what went wrong, or nothing."""
    running = []
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    for number, line in enumerate(commands):
        gpu = gpus[number] if number < len(gpus) and gpus[number] else str(number)
        own = {"CUDA_VISIBLE_DEVICES": gpu} if each_its_own and not SMALL else {}
        told = {**os.environ, **own}
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(line, env=told, start_new_session=True, **pipes))
    until, notes = time.monotonic() + limit, []
    try:
        for program in running:
            _, errors = program.communicate(timeout=max(1.0, until - time.monotonic()))
            if program.returncode:
                notes.append(_cause(errors))
    except subprocess.TimeoutExpired:
        notes.append(f"not done in {limit:.0f} s")
    finally:  # Ctrl-C, too
        for program in running:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # and the processes that it has started
            program.communicate()
    return "; ".join(notes)


def _cause(errors: str) -> str:
    """The last line that names an error, other than a launcher's of a process that has failed."""
    lines = [line.split("]:", 1)[-1].strip() for line in errors.splitlines() if "ChildFailedError" not in line]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (named or lines or ["no word"])[-1][:200]


def measure(name: str, job: Job, gpus: int, pairs: int, limit: float, profile: bool) -> dict[str, Any]:
    """The line of a job."""
    alone = job.alone
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{number}.jsonl") for number in range(gpus if alone else 1)]
        tables = Path(folder, "profile.txt") if profile and not alone else None
        note = run([command(job, 1 if alone else gpus, pairs, out, tables) for out in outs], alone, limit)
        found = [json.loads(out.read_text()) for out in outs if out.exists()]
    line: dict[str, Any] = {"bench": "several_gpus", "job": name, "gpus": gpus, "model": job.model, "note": note}
    if len(found) < len(outs):
        return {**line, **environment()}
    first = found[0]
    rates = {key: sum(one[key] for one in found) for key in ("pairs_s", "tokens_s")}
    return {
        **first,
        **line,
        **{key: round(value, 2) for key, value in rates.items()},
        "tokens_gpu": round(rates["tokens_s"] / gpus),
        "median_step_s": max(one["median_step_s"] for one in found),
        "exposed_ms": (first.get("profile") or {}).get("exposed_ms"),
        "step0": first["step0_pairs_exact"],
    }


def main(argv: list[str] | None = None) -> None:
    gpus = 2 if SMALL else torch.cuda.device_count()
    options = parser(__doc__)
    options.add_argument("--jobs", nargs="+", choices=jobs(gpus), metavar="JOB", help=", ".join(jobs(gpus)))
    options.add_argument("--pairs", type=int, default=PAIRS, help="of each GPU")
    options.add_argument("--limit", type=float, default=150.0, help="seconds of a job, at most")
    options.add_argument("--profile", action="store_true", help="see how long GPUs only talk to each other")
    args = options.parse_args(argv)
    lines: list[dict[str, Any]] = []
    all_jobs = jobs(gpus)
    for name, job in all_jobs.items():
        if gpus < job.least or name not in (args.jobs or all_jobs):
            continue
        line = measure(name, job, gpus, args.pairs, args.limit, args.profile)
        single = next((one for one in lines if all_jobs[one["job"]].measures(job)), None)
        if single and single.get("pairs_s") and line.get("pairs_s"):
            line["ratio"] = round(line["pairs_s"] / single["pairs_s"], 3)
        emit(line, args.out)
        lines.append(line)
    print(f"{device().type}\n{table(lines, COLUMNS)}")


if __name__ == "__main__":
    main()
