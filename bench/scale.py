"""Host work that grows with the data: of a start on many pairs, and of each step; JSON lines. Needs no GPU.

Pairs with the lengths of real data (`bench/lengths.py`) stand in columns, as a token cache has them; their ids are
random, and no two pairs are alike. Everything runs in one thread.

    work        what is done. "start: ...": once a start or a resume. "scoring: ...": once a pair that is scored anew.
                "ahead: ...": for each step, in the loader's thread, while the device computes the step before.
                "between: ...": for each step, between its numbers and the next step's first kernel
    seconds     for all pairs, or for one step

    python -m bench.scale
    python -m bench.scale --pairs 20000 --batch 64
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from bench.lengths import QUANTILES, draw
from bench.output import emit, environment, parser, rounded, table
from tuningfork.data.packing.loader import EpochOrder, build_packs, packs_in_windows
from tuningfork.data.packing.pack import PackLimits, split_fitting
from tuningfork.data.prepare import dataset_digest
from tuningfork.data.token_table import TYPES, Subset, TokenTable
from tuningfork.models.flops import FlopCounter
from tuningfork.models.mixers.attention import Attention, AttentionLayer
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import column
from tuningfork.reference.build import to_rescore
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.metrics import Means
from tuningfork.train.batch import StepBatch

COLUMNS = {"work": "work", "pairs": "pairs", "seconds": "seconds"}
SCORED_TOGETHER = 16  # pairs of a pack, about
FLUSH_EVERY = 2**13
Found = TypeVar("Found")


def many_pairs(lengths: np.ndarray) -> Subset:
    """Pairs of these lengths, int64 [n, 3], as a run has them that read them from a token cache."""
    pairs, tokens, rng = len(lengths), int(lengths.sum()), np.random.default_rng(0)
    said: dict[str, Any] = {
        "row": np.arange(1, pairs + 1),
        "piece": np.zeros(pairs),
        "answers": np.full(pairs, 2),
        "prompt": lengths[:, 0],
        "label": np.full(pairs, -1),
        "weight": np.ones(pairs),
        "margin": np.full(pairs, np.nan),
        "group": np.zeros(pairs, "<u8"),
        "content": np.zeros(pairs, TYPES["content"]),
        "answer": lengths[:, 1:].reshape(-1),
        "text": np.zeros(2 * pairs),
        "ids": rng.integers(0, 30_000, tokens, dtype=np.int32),
        "counts": np.ones(tokens, bool),
    }
    columns = {name: np.asarray(said[name], dtype=kind) for name, kind in TYPES.items()}
    rows = TokenTable("drawn", columns)
    columns["content"][:] = column(list(rows), "content")
    return Subset([Subset([rows])])


def start_and_scoring(pairs: Subset, limits: PackLimits, folder: Path) -> Iterator[tuple[str, float]]:
    """What a start does with all pairs, in its order; with a reference cache that is filled on the way."""
    objective, everything = ObjectiveConfig().build(), [pairs, Subset([])]
    yield "start: which fit a pack", _seconds(lambda: split_fitting(pairs, limits.tokens, "prompt"))
    yield "start: the longest", _seconds(lambda: column(pairs, "longest").max())
    yield "start: the objective's check", _seconds(lambda: objective.check(pairs))
    order = EpochOrder.plan(len(pairs), 64, 0, 1.0, None)
    yield "start: which examples are used", _seconds(order.used_indices)
    yield "start: digest of the data", _seconds(lambda: dataset_digest(pairs))
    store = ReferenceStore(folder, {"a": "b"})

    def keep() -> None:
        for first in range(0, len(pairs), SCORED_TOGETHER):
            some = pairs[first : first + SCORED_TOGETHER]
            store.add(some, [-1.0] * 2 * len(some))
            if first % FLUSH_EVERY == 0:
                store.flush()
        store.flush()
        store.join()

    yield "scoring: keeping the log-probs", _seconds(keep)
    yield "start: opening the reference", _seconds(lambda: ReferenceStore(folder, {"a": "b"}))
    store = ReferenceStore(folder, {"a": "b"})
    yield "start: choosing what is scored again", _seconds(lambda: to_rescore(store, everything))
    yield "start: looking for what is not cached", _seconds(lambda: store.missing(pairs))


def scoring_packs(pairs: Subset, limits: PackLimits) -> float:
    """Seconds to pack and lay out all pairs, as for the reference and an evaluation."""
    return _seconds(lambda: sum(1 for _ in packs_in_windows(pairs, limits)))


def of_a_step(pairs: Subset, batch: int, limits: PackLimits, store: ReferenceStore) -> Iterator[tuple[str, float]]:
    """Host work for a step of `batch` pairs: the median of five steps, after one that is not counted."""
    objective = ObjectiveConfig().build()
    flops = FlopCounter(10**9, 10**8, (Attention((AttentionLayer(2048, None, head_width=128),) * 16),))
    scores = torch.randn(2 * batch, dtype=torch.float64)
    spent: dict[str, list[float]] = {}

    def timed(work: str, function: Callable[..., Found], *args: Any) -> Found:
        begun = time.perf_counter()
        found = function(*args)
        spent.setdefault(work, []).append(time.perf_counter() - begun)
        return found

    for step in range(6):
        examples = [pairs[n % len(pairs)] for n in range(step * batch, (step + 1) * batch)]
        packs = timed("ahead: packs", build_packs, examples, limits)
        members = [example for pack in packs for example in pack.examples]
        logps = timed("ahead: reference", store.lookup, members)
        batch_ahead = timed("ahead: answers and totals", StepBatch.of, packs, objective, logps)
        timed("ahead: model flops", lambda packs=packs: [flops.training(p.spans, len(p.logit_rows)) for p in packs])
        values = timed("between: values of the statistics", objective.statistics, scores, batch_ahead.answers)
        timed("between: their sums", Means.of, values)
    for work, found in spent.items():
        yield work, float(np.median(found[1:]))


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=1_000_000)
    options.add_argument("--batch", type=int, default=512, help="pairs of a step")
    options.add_argument("--lengths", choices=sorted(QUANTILES), default="hh")
    options.add_argument("--tokens", type=int, default=16_384, help="rows of a pack")
    args = options.parse_args(argv)
    torch.set_num_threads(1)
    about = {"bench": "scale", "lengths": args.lengths, "tokens": args.tokens, **environment("numpy")}
    lines: list[dict[str, Any]] = []

    def tell(work: str, pairs: int, seconds: float) -> None:
        lines.append({"work": work, "pairs": pairs, "seconds": rounded(seconds, 4), **about})
        emit(lines[-1], args.out)

    pairs, limits = many_pairs(draw(args.lengths, args.pairs)), PackLimits.plan(args.tokens, "prompt", compiled=True)
    with tempfile.TemporaryDirectory() as folder:
        for work, seconds in start_and_scoring(pairs, limits, Path(folder)):
            tell(work, len(pairs), seconds)
        some = pairs[: min(len(pairs), 20_000)]
        tell("scoring: packs", len(some), scoring_packs(some, limits))
        for work, seconds in of_a_step(pairs, args.batch, limits, ReferenceStore(Path(folder), {"a": "b"})):
            tell(work, args.batch, seconds)
    print(table(lines, COLUMNS))
    start = sum(line["seconds"] for line in lines if line["work"].startswith("start"))
    print(f"a start on {len(pairs):,} pairs: {start:.2f} s")


def _seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
