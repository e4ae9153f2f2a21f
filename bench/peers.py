"""tuningfork and its peers on the fixed workload, one after the other on one card, each in its own process.

Peers run through the script that knows them (trl_bench.py), on the OLMo2-1B shape. With which settings a peer is at
its best depends on the card, so these are searched first, on part of the workload (bench/peer_search.py); the best
two are then timed on all of it, beside ours, adding gradients up to as many pairs a step as our largest: a step of
the optimizer costs the same for few pairs as for many. A peer that is not installed is named as missing; a run that
fails shows its last lines. Every run is one line, of OUT/search.jsonl while the settings are searched, else of
OUT/peers.jsonl:

    pairs_s      pairs / wall seconds, warm-up left out: ours after the first epoch, a peer's after its first steps
    tokens_s     the same for tokens as a plain trainer counts them, the prompt once per answer
    mfu          model flops / these seconds / the card's bfloat16 peak. For every trainer these are the flops that our
                 counter (models/flops.py) finds necessary, on unique tokens: a peer's pairs_s times the flops of a pair
    hfu          with recomputed activations counted too; None for a peer, which does not say how much it padded
    peak_gib     most device memory held at once by the trainer's tensors
    ratio        pairs_s / that of the best peer of this call, in the table

    python -m bench.peers --out results-of-today                            # about 20 minutes
    python -m bench.peers --out results-of-today --search                   # only search
    python -m bench.peers --out results-of-today --trl "--bs 8 --gc 0 --liger 1"    # no search, these settings
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from bench import peer_search, shapes
from bench.output import emit, environment, parser, peak, table
from tuningfork.models.flops import by_itself
from tuningfork.models.policy import Policy

ROOT = Path(__file__).parent.parent
MODEL = "olmo2_1b"  # the one shape that trl_bench.py knows
EXAMPLES_PER_STEP = 64
OURS = (
    "--examples_per_step 16 --head_chunk_rows 16384",
    f"--examples_per_step {EXAMPLES_PER_STEP} --head_chunk_rows 16384 --pack_tokens 32768",
)
PAIRS_TO_SEARCH = 128  # of the workload's 512
BEST = 2  # settings of a peer that are timed on the whole workload
ERROR_LINES = 6
COLUMNS = {
    "trainer": "trainer",
    "settings": "settings",
    "examples_per_step": "pairs/step",
    "pairs_s": "pairs/s",
    "tokens_s": "tokens/s",
    "mfu_percent": "MFU %",
    "hfu_percent": "HFU %",
    "peak_gib": "peak GiB",
    "ratio": "x best peer",
    "status": "status",
}


@dataclass(frozen=True)
class Run:
    """One trainer at one setting: a program of this folder, what it needs installed, and its arguments."""

    trainer: str
    program: tuple[str, ...]
    settings: str
    needs: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        return [*self.program, *shlex.split(self.settings)]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def ours(settings: str, pairs: int) -> Run:
    """tuningfork at some settings of bench.step."""
    return Run("tuningfork", ("-m", "bench.step", "--model", MODEL, "--pairs", str(pairs)), settings)


def trl(settings: str, pairs: int) -> Run:
    """TRL at some settings of its script."""
    needs = ("trl", "datasets", *(["liger_kernel"] if "--liger 1" in settings else []))
    return Run("trl", ("bench/trl_bench.py", "--model", MODEL, "--pairs", str(pairs)), settings, needs)


def measure(run: Run, timeout: float) -> dict[str, Any]:
    """Run one trainer. `status` is ok, missing, timeout or failed; `result` is the line it printed, as it is."""
    line: dict[str, Any] = {"trainer": run.trainer, "settings": run.settings}
    line["command"] = shlex.join(["python", *run.arguments])
    if run.missing:
        return {**line, "status": "missing", "error": [f"not installed: {', '.join(run.missing)}"]}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    begun = time.perf_counter()
    # Files rather than pipes: a worker that outlives its trainer would keep a pipe open.
    with tempfile.TemporaryFile() as out_file, tempfile.TemporaryFile() as err_file:
        process = subprocess.Popen(
            [sys.executable, *run.arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,  # one group, so that its workers end with it
        )
        status = "failed"
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out, err = (_content(file) for file in (out_file, err_file))
    line["process_s"] = round(time.perf_counter() - begun, 1)
    results = [text for text in out.splitlines() if text.startswith('{"trainer"')]
    if process.returncode == 0 and results:
        return {**line, "status": "ok", "result": json.loads(results[-1])}
    last = [text for text in f"{out}\n{err}".splitlines() if text.strip()][-ERROR_LINES:]
    return {**line, "status": status, "error": [text[:200] for text in last]}


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def flops_of_a_pair(pairs: int) -> float:
    """Model flops of training on one pair of the workload, on average, by our counter; no weight is made."""
    examples = shapes.yardstick(pairs)
    policy = Policy.plain(shapes.build(MODEL, "meta"), torch.bfloat16)
    flops = policy.flops()
    return sum(flops.training(*by_itself(example)) for example in examples) / len(examples)


def comparable(line: dict[str, Any], pair_flops: float, peak_flops: float | None) -> dict[str, Any]:
    """The line with the columns that compare, from whatever its trainer printed."""
    result = line.get("result")
    if result is None:
        return line
    shared = {key: result[key] for key in ("pairs_s", "peak_gib")}
    if line["trainer"] == "tuningfork":
        own = {key: result[key] for key in ("examples_per_step", "tokens_s", "mfu", "hfu")}
    else:
        mfu = None if peak_flops is None else round(result["pairs_s"] * pair_flops / peak_flops, 4)
        batch = result["args"]["bs"] * result["args"]["ga"]
        own = {"examples_per_step": batch, "tokens_s": result["useful_tok_s"], "mfu": mfu, "hfu": None}
    return {**line, **shared, **own}


def render(lines: Sequence[dict[str, Any]]) -> str:
    """The table, and under it why a run has no numbers."""
    peers = [line["pairs_s"] for line in lines if line["trainer"] != "tuningfork" and line["status"] == "ok"]
    rows = []
    for line in lines:
        row = dict(line)
        for key in ("mfu", "hfu"):
            row[f"{key}_percent"] = None if line.get(key) is None else round(100 * line[key], 1)
        if peers and line["status"] == "ok":
            row["ratio"] = round(line["pairs_s"] / max(peers), 2)
        rows.append(row)
    reasons = [
        "\n".join([f"\n{line['trainer']} {line['settings']}: {line['status']}", *(f"    {e}" for e in line["error"])])
        for line in lines
        if line["status"] != "ok"
    ]
    return "\n".join([table(rows, COLUMNS), *reasons])


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, out="the folder that the results are written to", required=True)
    options.add_argument("--search", action="store_true", help="only search a peer's settings")
    options.add_argument("--trl", action="append", help="settings of trl_bench.py to time instead of a search")
    options.add_argument("--pairs", type=int, default=512)
    options.add_argument("--timeout", type=float, default=240, help="seconds for each run")
    args = options.parse_args(argv)
    pair_flops, about = flops_of_a_pair(args.pairs), environment("trl", "liger-kernel", "datasets")

    def timed(run: Run, file: str) -> dict[str, Any]:
        print(f"running {run.trainer} {run.settings}", file=sys.stderr, flush=True)
        line = comparable({**about, **measure(run, args.timeout)}, pair_flops, peak())
        emit(line, args.out / file)
        return line

    searched: list[dict[str, Any]] = []

    def rate(settings: peer_search.Settings) -> float | None:
        searched.append(timed(trl(str(settings), min(args.pairs, PAIRS_TO_SEARCH)), "search.jsonl"))
        return searched[-1].get("pairs_s")

    settings = args.trl or [
        f"{found} --ga {max(1, EXAMPLES_PER_STEP // found.bs)}" for _, found in peer_search.search(rate)[:BEST]
    ]
    parts = [render(searched)] if searched else []
    if not args.search:
        runs = [*(ours(own, args.pairs) for own in OURS), *(trl(found, args.pairs) for found in settings)]
        parts.append(render([timed(run, "peers.jsonl") for run in runs]))
    text = "\n\n".join(parts)
    (args.out / "peers.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
