"""What the kernels of native sparse attention have to do at least: flops and bytes of each, by formula from the shape.

A kernel takes no less than its flops at the card's stated peak, nor than its bytes at that of its memory; which of the
two is longer says what it is bound by, and how long it takes beside it how far it is from that. Counted are products of
matrix units for pairs that see one another, not the rest of their tiles, and nothing of softmax and choice, which
matrix units do not do. Of bytes each that goes to or from memory counts once, but for rows that are gathered anew for
each slot, a row's chosen block: what is read between two of them is more than caches hold. Where a row's program reads
keys and values of its blocks instead, these come from the L2 cache; they count apart, since no data sheet states its
speed. Parts of gradients beyond the first count nothing: how many there are depends on what is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tuningfork.kernels.nsa.plain import Choice, Grid

FLOAT32, INT32 = 4, 4  # bytes


class Pairs(NamedTuple):
    """Counts over all rows of documents, each for one head of a query, or for one group of them."""

    rows: int
    blocks: int  # compressed ones
    compressed: int  # pairs of a row and a compressed block
    choosing: int  # rows that choose: those whose own block has as many before it as are chosen
    scored: int  # pairs of a row that chooses and a compressed block
    selected: int  # pairs of a row and a row of a chosen block
    window: int  # pairs of a row and a row of its window
    slots: int  # pairs of a row and a chosen block
    candidates: int  # pairs of a row that chooses and a block that it may choose

    @classmethod
    def of(cls, documents: Iterable[int], grid: Grid, choice: Choice, window: int) -> Pairs:
        """Of documents of so many rows each. Row by row, not in closed form: it is what products are held against."""
        return cls(*map(sum, zip(*(cls._of_one(n, grid, choice, window) for n in documents), strict=True)))

    @classmethod
    def _of_one(cls, rows: int, grid: Grid, choice: Choice, window: int) -> tuple[int, ...]:
        seen = np.arange(1, rows + 1)  # by a row: itself and those before it
        complete = np.where(seen < grid.length, 0, (seen - grid.length) // grid.stride + 1)
        own = (seen - 1) // grid.select
        chooses = own >= choice.count
        slots = np.minimum(own + 1, choice.count)
        counts = (
            complete[-1],
            complete.sum(),
            chooses.sum(),
            complete[chooses].sum(),
            ((slots - 1) * grid.select + (seen - 1) % grid.select + 1).sum(),  # its own block is one of them, in part
            np.minimum(seen, window).sum(),
            slots.sum(),
            (own[chooses] + 1).sum(),
        )
        return rows, *map(int, counts)

    @property
    def read(self) -> int:
        """Keys that a query reads in its three branches, over all rows."""
        return self.compressed + self.selected + self.window


class Work(NamedTuple):
    """Of one kernel in one training step of a layer."""

    flops: int
    bytes: int
    cached: int = 0  # bytes that rows' programs read of the cache


def works(pairs: Pairs, heads: int, groups: int, dk: int, dv: int, grid: Grid, choice: Choice) -> dict[str, Work]:
    """The work of every kernel that the attention part of a layer may launch, by its name, for 16-bit numbers.

    Selected attention by blocks has the names `nsa_block_*`, row by row `nsa_selected_*`; a layer has one of them.
    """
    number = 2
    size = grid.select
    line = pairs.rows * heads  # a head of a row
    q, out = line * dk * number, line * dv * number
    kv, entries = ((of * groups * (dk + dv) * number) for of in (pairs.rows, pairs.blocks))
    parts_kv, parts_entries = ((of * groups * (dk + dv) * FLOAT32) for of in (pairs.rows, pairs.blocks))
    statistic = line * FLOAT32  # a number for each head of a row: log-sum-exp, or what its softmax takes off
    chosen = pairs.rows * groups * choice.count * INT32
    slots = pairs.slots * heads
    gathered = slots * (dk * number) + pairs.slots * groups * INT32  # queries, and where they lie
    with_gradient = gathered + slots * (dv * number + 2 * FLOAT32)
    blocks_read = pairs.slots * groups * size * (dk + dv) * number

    def forward(of: int) -> int:
        return of * heads * 2 * (dk + dv)

    def query_gradient(of: int) -> int:  # q k, d_out v, d_score k
        return of * heads * 2 * (2 * dk + dv)

    def key_gradient(of: int) -> int:  # q k, weight d_out, d_out v, d_score q
        return of * heads * 2 * (2 * dk + 2 * dv)

    into_queries = q + 2 * out + 2 * statistic + q  # of their gradient: reads queries, results, gradients; writes
    return {
        "nsa_mean": Work(0, kv + entries),
        "nsa_compressed_forward": Work(forward(pairs.compressed), q + entries + out + statistic),
        "nsa_compressed_query_gradient": Work(query_gradient(pairs.compressed), into_queries + entries),
        "nsa_compressed_key_gradient": Work(
            key_gradient(pairs.compressed), q + out + 2 * statistic + entries + parts_entries
        ),
        "nsa_scores": Work(
            pairs.scored * heads * 2 * dk,
            pairs.choosing * heads * (dk * number + FLOAT32)
            + (pairs.blocks * groups * dk * number if pairs.choosing else 0)
            + pairs.candidates * groups * 2 * FLOAT32,
        ),
        "nsa_choose": Work(0, pairs.candidates * groups * 2 * FLOAT32 + chosen),
        "nsa_lists": Work(0, 2 * chosen),
        "nsa_block_forward": Work(forward(pairs.selected), gathered + kv + slots * (dv + 2) * FLOAT32),
        "nsa_block_merge": Work(0, slots * (dv + 2) * FLOAT32 + chosen + out + statistic),
        "nsa_block_delta": Work(0, 2 * out + statistic),
        "nsa_block_gradients": Work(
            pairs.selected * heads * 2 * (3 * dk + 2 * dv), with_gradient + kv + slots * dk * FLOAT32 + 2 * parts_kv
        ),
        "nsa_block_merge_gradient": Work(0, slots * dk * FLOAT32 + chosen + q),
        "nsa_selected_forward": Work(forward(pairs.selected), q + kv + out + statistic + chosen, blocks_read),
        "nsa_selected_query_gradient": Work(query_gradient(pairs.selected), into_queries + kv + chosen, blocks_read),
        "nsa_selected_key_gradient": Work(key_gradient(pairs.selected), with_gradient + kv + parts_kv),
        "nsa_sum_parts": Work(0, parts_kv + kv + parts_entries + entries),
        "nsa_sum_places": Work(0, entries + kv),
        "fork_forward": Work(forward(pairs.window), q + kv + out + statistic),
        "fork_weighted_gradient": Work(0, 2 * out + statistic),
        "fork_query_gradient": Work(query_gradient(pairs.window), q + out + 2 * statistic + kv + q),
        "fork_key_gradient": Work(key_gradient(pairs.window), q + out + 2 * statistic + 2 * kv),
    }


def beside(
    milliseconds: Mapping[str, float], work: Mapping[str, Work], flops_s: float | None, bytes_s: float | None
) -> dict[str, dict[str, Any]]:
    """Of each kernel by name, `ms`; and of those whose work is known

    flops_ms, bytes_ms   the least that its flops and bytes take at these speeds; None where a speed is not known
    of_bound             the larger of them / ms: 1 is as fast as the card can be
    bound                which is the larger, "flops" or "bytes"
    cache_tb_s           1e12 bytes/s that come of the cache, where rows read their blocks' keys there
    """
    found: dict[str, dict[str, Any]] = {}
    for name, ms in milliseconds.items():
        line: dict[str, Any] = {"ms": ms}
        if (of := work.get(name)) is not None:
            least = {
                kind: None if speed is None else 1e3 * amount / speed
                for kind, amount, speed in (("flops", of.flops, flops_s), ("bytes", of.bytes, bytes_s))
            }
            line |= {f"{kind}_ms": None if t is None else float(f"{t:.3g}") for kind, t in least.items()}
            known = {kind: t for kind, t in least.items() if t is not None}
            if len(known) == 2 and ms:
                line["bound"] = max(known, key=lambda kind: known[kind])
                line["of_bound"] = round(max(known.values()) / ms, 3)
            if of.cached and ms:
                line["cache_tb_s"] = round(of.cached / ms / 1e9, 2)
        found[name] = line
    return found
