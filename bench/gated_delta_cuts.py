"""Which cut of each kernel of the gated delta rule's scan is the fastest on this card; JSON lines and a table.

A cut (`_cuts.Cut`) is how many columns of values a kernel works on at a time, its warps and its pipeline stages. One
kernel is cut anew at a time, the others stay as they are, on a pack of the yardstick's pairs with shared prompts and,
for kernels that go through trees, on one document. What is found goes into `CUTS` by hand: training never tunes.

    us           microseconds of the kernel, the least of the repeats; a forward and backward pass may call it twice
    document_us  on one document as long as the pack
    off          the largest change of the result or a gradient against the cuts as they are, as norm / norm

Kernels are compiled by several processes first.

    python -m bench.gated_delta_cuts --shapes 30x30x96x192
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gated_delta import Scan, Shape, batches, random_rows
from bench.output import device, emit, environment, failure, parser, table
from tuningfork.kernels.gated_delta._cuts import CUTS, Cut, cut_of
from tuningfork.kernels.gated_delta.fast import TritonGatedDelta
from tuningfork.records import PackedBatch

IN_USE = dict(CUTS)
COLUMNS = (64, 128)  # of 32 some are computed wrongly, and one ends all other work on the card: see docs/log.md
WARPS = (4, 8)
STAGES = (1, 2, 3)
SHOWN = 4  # cuts of each kernel in the table


def cuts(kernel: str, key: Tensor, value: Tensor) -> Iterator[Cut]:
    """Those that are tried for keys and values of these widths; the one that is in use comes first."""
    forms: Iterator[tuple[int, int, int]] = product(COLUMNS, WARPS, STAGES)
    if kernel == "delta_solve":  # it has neither values nor loads to be ahead of
        forms = product((IN_USE[kernel].columns,), (1, 2, 4, 8), (1,))
    found = []
    for cut in (IN_USE[kernel], *map(Cut._make, forms)):
        with in_use(kernel, cut):
            found.append(cut_of(kernel, key, value))  # narrow heads get less than is asked for
    yield from dict.fromkeys(found)


@contextmanager
def in_use(kernel: str, cut: Cut) -> Iterator[None]:
    CUTS[kernel] = cut
    try:
        yield
    finally:
        CUTS.update(IN_USE)


class Pass:
    """A forward and backward pass of the scan over one layout."""

    def __init__(self, shape: Shape, batch: PackedBatch) -> None:
        where = device()
        *self.leaves, self.gradient = random_rows(len(batch.input_ids), shape, where)
        self.scan: Scan = TritonGatedDelta.prepare(batch.to(where).layout).scan

    def __call__(self) -> list[Tensor]:
        found = self.scan(*self.leaves)
        return [found.detach(), *torch.autograd.grad(found, self.leaves, self.gradient)]

    def with_cut(self, kernel: str, cut: Cut) -> list[Tensor]:
        """The results where one kernel is cut so."""
        with in_use(kernel, cut):
            return self()

    def cuts(self, kernel: str) -> list[Cut]:
        _, key, value, *_ = self.leaves
        return [*cuts(kernel, key, value)]

    def microseconds(self, kernel: str, cut: Cut, repeats: int) -> float:
        """The least time of one call."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as watched:
            for _ in range(repeats):
                self.with_cut(kernel, cut)
            torch.cuda.synchronize()
        return min(event.time_range.elapsed_us() for event in watched.events() if event.name == kernel)


def passes(shape: Shape, tokens: int, pairs: int) -> dict[str, Pass]:
    packs = batches(tokens, pairs)
    return {layout: Pass(shape, packs[layout]) for layout in ("shared", "document")}


def compile_share(share: int, shares: int, shape: Shape) -> None:
    """Compile one cut of `shares`, from number `share` on, by running each on a small pack."""
    once = passes(shape, 2048, 16)["shared"]
    for kernel, cut in [(name, cut) for name in IN_USE for cut in once.cuts(name)][share::shares]:
        try:
            once.with_cut(kernel, cut)
            torch.cuda.synchronize()
        except Exception as error:  # reported where it is timed
            print(f"{kernel} {tuple(cut)}: {failure(error)}", flush=True)


def compile_all(shape: Shape, shares: int) -> None:
    """By several processes, whose kernels meet in Triton's cache on the disk."""
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=compile_share, args=(share, shares, shape)) for share in range(shares)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def measure(kernel: str, cut: Cut, runs: dict[str, Pass], usual: list[Tensor], repeats: int) -> dict[str, Any]:
    found = runs["shared"].with_cut(kernel, cut)
    off = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, usual, strict=True)]
    largest = float(torch.stack(off).max())  # NaN where one is
    line: dict[str, Any] = {"us": runs["shared"].microseconds(kernel, cut, repeats), "off": largest}
    if kernel in ("delta_states", "delta_state_gradients"):
        line["document_us"] = runs["document"].microseconds(kernel, cut, repeats)
    return {name: float(f"{value:.4g}") for name, value in line.items()}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", help="key heads x value heads x their widths", default=["30x30x96x192"])
    options.add_argument("--tokens", type=int, default=16384, help="rows of a shared pack")
    options.add_argument("--pairs", type=int, default=512, help="of the yardstick, to choose from")
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="that compile")
    args = options.parse_args(argv)
    for shape in map(Shape.parse, args.shapes):
        compile_all(shape, args.processes)
        runs = passes(shape, args.tokens, args.pairs)
        usual, best = runs["shared"](), []
        for kernel in IN_USE:
            lines = []
            first, *_ = tried = runs["shared"].cuts(kernel)
            for cut in tried:
                line: dict[str, Any] = {"bench": "gated_delta_cuts", "heads": str(shape), "kernel": kernel}
                line |= {**cut._asdict(), "in_use": cut == first}
                try:
                    line |= measure(kernel, cut, runs, usual, args.repeats)
                except Exception as error:  # too large for this card is a result
                    line["note"] = failure(error)
                emit({**line, **environment()}, args.out)
                lines.append(line)
                torch.cuda.synchronize()  # an illegal access ends this program here: no kernel works behind it
            lines = sorted((line for line in lines if "us" in line), key=lambda line: float(line["us"]))
            best += [line for number, line in enumerate(lines) if number < SHOWN or line["in_use"]]
        names = ("kernel", "columns", "warps", "stages", "in_use", "us", "document_us", "off")
        print(table(best, {name: name for name in names}))


if __name__ == "__main__":
    main()
