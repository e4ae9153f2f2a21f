"""Native sparse attention query by query, and random inputs of it that depend on a row's path alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tests.forests import MOST_PATHS, Known, normal, paths
from tuningfork.kernels.nsa.plain import Choice, Grid, PlainNsa, _by_block
from tuningfork.records import ForkLayout, PackedBatch

LEAVES = ("compressed query", "compressed key", "compressed value", "query", "key", "value")
NAMES = ["out", *(f"d {name}" for name in LEAVES)]


class Sizes(NamedTuple):
    """Of a layer: query heads, groups, widths of keys and values, and where its blocks lie."""

    heads: int = 4
    groups: int = 2
    key_width: int = 6
    value_width: int = 5
    grid: Grid = Grid(8, 4, 16)
    choice: Choice = Choice(4, 1, 2)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Heads and their widths, see LEAVES."""
        one = [(self.heads, self.key_width), (self.groups, self.key_width), (self.groups, self.value_width)]
        return one * 2

    @property
    def scale(self) -> float:
        return self.key_width**-0.5


def random_inputs(numbers: torch.Tensor, sizes: Sizes, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """LEAVES of rows, by each row's number alone (forests.Known)."""
    return [normal(numbers, *shape, seed=seed).to(dtype) for seed, shape in enumerate(sizes.shapes)]


def learned(blocks: torch.Tensor) -> torch.Tensor:
    """A compression of blocks [..., l, G, w] -> [..., G, w] in which each place of a block, and each column, counts
    otherwise: it shows a block whose rows are in another order."""
    length, width = blocks.shape[-3], blocks.shape[-1]
    weights = (
        torch.linspace(-1, 2, length * width, dtype=blocks.dtype, device=blocks.device).cos().view(length, 1, width)
    )
    return (blocks * weights).sum(-3)


def definition(
    batch: PackedBatch, given: Sequence[torch.Tensor], sizes: Sizes, compress: Any = learned
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row from its path alone: [T, 2 H, dv], compressed and selected; and the chosen blocks [T, G, n]."""
    cq, ck, cv, q, k, v = given
    (length, d, select), (count, initial, local), (h, g) = sizes.grid, sizes.choice, (sizes.heads, sizes.groups)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # compressed blocks, by their last row
    out, chosen = [], torch.full((len(q), g, count), -1, dtype=torch.int32)
    for row, path in enumerate(paths(batch)):
        t, places = len(path) - 1, torch.from_numpy(path)
        for i in range((t + 1 - length) // d + 1 if t + 1 >= length else 0):
            own = places[i * d : i * d + length]
            if int(own[-1]) not in made:
                made[int(own[-1])] = (compress(ck[own]), compress(cv[own]))
        blocks = [made[int(last)] for last in path[length - 1 :: d]]
        keys, values = (torch.stack(part, 1) for part in zip(*blocks, strict=True)) if blocks else (None, None)
        results: list[list[torch.Tensor]] = [[], []]
        for group in range(g):
            of_group = slice(group * (h // g), (group + 1) * (h // g))
            J, weights = t // select + 1, []
            compressed = cv.new_zeros(h // g, sizes.value_width)
            if blocks:
                p = torch.softmax(cq[row, of_group] @ keys[group].T * sizes.scale, 1)
                compressed, weights = p @ values[group], p.sum(0).tolist()
            scores = [0.0] * J
            for j in range(J):
                for m in range(select // d):
                    for u in range(length // d):
                        i = (select // d) * (j + 1) - 1 - m - u
                        scores[j] += weights[i] if 0 <= i < len(weights) else 0.0
            forced = {j for j in range(J) if j < initial or j >= J - local}
            rest = sorted(set(range(J)) - forced, key=lambda j: (-scores[j], j))
            choice = sorted([*sorted(forced), *rest][:count])
            chosen[row, group, : len(choice)] = torch.tensor(choice)
            seen = places[torch.tensor([p for j in choice for p in range(j * select, min((j + 1) * select, t + 1))])]
            p = torch.softmax(q[row, of_group] @ k[seen, group].T * sizes.scale, 1)
            results[0].append(compressed)
            results[1].append(p @ v[seen, group])
        out.append(torch.cat([*results[0], *results[1]]))
    return torch.stack(out), chosen


class Definition:
    """The definition in the place of a form: the truth in float64."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch

    def read(self, given: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        return definition(self._batch, given, sizes)


class Form(NamedTuple):
    """A form of kernels/nsa, with its compressed blocks made as `learned` makes them, or by their mean."""

    kind: Any
    layout: ForkLayout
    mean: bool = False
    chosen: torch.Tensor | None = None  # given indices, in place of its own

    def read(self, given: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        cq, ck, cv, q, k, v = given
        op = self.kind.prepare(self.layout, sizes.grid)
        keys, values = (op.mean(rows) if self.mean else learned(op.blocks(rows)) for rows in (ck, cv))
        out, chosen = op.compressed(cq, keys, values, scale=sizes.scale, choice=sizes.choice)
        read = op.selected(q, k, v, chosen if self.chosen is None else self.chosen, scale=sizes.scale)
        return torch.cat([out, read], 1), chosen


def attended(
    form: Any,
    batch: PackedBatch,
    numbers: torch.Tensor,
    sizes: Sizes,
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What a form makes of a pack: NAMES, the gradients those of a random sum; and the chosen blocks [T, G, n].

    Args:
        rounded: a dtype to which inputs are rounded before; else the same.
    """
    rounded, device = rounded or dtype, batch.layout.position_of_row.device
    leaves = [t.to(device, dtype).requires_grad_() for t in random_inputs(numbers, sizes, rounded)]
    out, chosen = form.read(leaves, sizes)
    upstream = normal(numbers, 2 * sizes.heads, sizes.value_width, seed=9).to(rounded).to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)], chosen


def check_paths_decide_bits(kind: Any, packs: Sequence[PackedBatch], sizes: Sizes, dtype: torch.dtype) -> None:
    """Rows of equal paths have equal outputs, choices and gradients of queries, in whichever pack they lie."""
    known = Known()
    first: list[torch.Tensor] = []
    met = 0
    for batch in packs:
        numbers = known.rows(batch.to(torch.device("cpu")))
        found, chosen = attended(Form(kind, batch.layout, mean=True), batch, numbers, sizes, dtype)
        kept = [t.cpu() for t in (found[0], found[1], found[4], chosen.to(dtype))]
        assert all(t.isfinite().all() for t in kept)
        if not first:
            first = [t.new_full((MOST_PATHS, *t.shape[1:]), float("nan")) for t in kept]
        for seen, ours in zip(first, kept, strict=True):
            new = seen[numbers].isnan().flatten(1).all(1)
            met += int((~new).sum())
            seen[numbers[new]] = ours[new]
            assert torch.equal(seen[numbers], ours)
    assert met > len(packs[0].input_ids)


def check_error_and_repeat(kind: Any, batch: PackedBatch, sizes: Sizes, dtype: torch.dtype, mean: bool = False) -> None:
    """With given choices a fast form is as near to the truth as its dtype allows, and another run has the same bits.

    In float32 the only loss is that of sums. In a narrower dtype operands of products are rounded, too, each by a third
    of a unit of its last place as a mean: compressed keys, weights and the result lose about one unit of an output's
    size, and twice as many about twice that of a gradient's.
    """
    numbers = Known().rows(batch.to(torch.device("cpu")))
    truth, chosen = attended(Form(PlainNsa, batch.layout, mean), batch, numbers, sizes, torch.float64, rounded=dtype)
    form = Form(kind, batch.layout, mean, chosen)
    (ours, own), (again, own_again) = (attended(form, batch, numbers, sizes, dtype) for _ in range(2))
    assert torch.equal(own, own_again)
    for place, (name, o, a, t) in enumerate(zip(NAMES, ours, again, truth, strict=True)):
        check_error(name, o, t, dtype, gradient=place > 0)
        assert torch.equal(o, a), f"{name}: another run has other bits"


def selected_alone(
    kind: Any, batch: PackedBatch, sizes: Sizes, dtype: torch.dtype, chosen: torch.Tensor, rounded: torch.dtype
) -> list[torch.Tensor]:
    """Selected attention of given choices: out, and the gradients of query, key and value of a random sum."""
    device, numbers = batch.layout.position_of_row.device, Known().rows(batch.to(torch.device("cpu")))
    op = kind.prepare(batch.layout, sizes.grid)
    leaves = [t.to(device, dtype).requires_grad_() for t in random_inputs(numbers, sizes, rounded)[3:]]
    out = op.selected(*leaves, chosen, scale=sizes.scale)
    upstream = normal(numbers, sizes.heads, sizes.value_width, seed=9).to(rounded).to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def check_selected(kind: Any, batch: PackedBatch, sizes: Sizes, dtype: torch.dtype) -> list[torch.Tensor]:
    """As check_error_and_repeat, of `selected_alone`, which is handed on."""
    numbers = Known().rows(batch.to(torch.device("cpu")))
    given = [t.to(batch.layout.position_of_row.device, torch.float64) for t in random_inputs(numbers, sizes, dtype)]
    _, chosen = Form(PlainNsa, batch.layout).read(given, sizes)
    truth = selected_alone(PlainNsa, batch, sizes, torch.float64, chosen, rounded=dtype)
    ours, again = (selected_alone(kind, batch, sizes, dtype, chosen, rounded=dtype) for _ in range(2))
    for place, (o, a, t) in enumerate(zip(ours, again, truth, strict=True)):
        check_error(("out", *NAMES[4:])[place], o, t, dtype, gradient=place > 0)
        assert torch.equal(o, a), "another run has other bits"
    return ours


def check_error(name: str, ours: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, gradient: bool) -> None:
    """See check_error_and_repeat."""
    assert torch.isfinite(ours).all(), f"{name}: not every element was written"
    bound = 1e-5 if dtype == torch.float32 else (2.6 if gradient else 1.3) * torch.finfo(dtype).eps
    error = ((ours.double() - truth).norm() / truth.norm()).item()
    assert error <= bound, f"{name}: {error:.1e}"


def check_choices(kind: Any, batch: PackedBatch, sizes: Sizes, dtype: torch.dtype) -> None:
    """A fast form chooses the blocks that the plain one does in float64, but where their scores are as good as equal:
    to 1e-5, some tens of float32's units, which exponentials of scores lose."""
    numbers = Known().rows(batch.to(torch.device("cpu")))
    device, (grid, choice) = batch.layout.position_of_row.device, (sizes.grid, sizes.choice)
    query, ck, cv = (t.to(device) for t in random_inputs(numbers, sizes, dtype)[:3])
    op, plain = kind.prepare(batch.layout, grid), PlainNsa.prepare(batch.layout, grid)
    keys, values = (learned(op.blocks(rows)) for rows in (ck, cv))
    how: dict[str, Any] = {"scale": sizes.scale, "choice": choice}
    _, found = op.compressed(query, keys, values, **how)
    _, wanted = plain.compressed(query.double(), keys.double(), values.double(), **how)
    differ = (found != wanted).any(-1).nonzero().tolist()
    assert len(differ) <= 1 + len(numbers) * sizes.groups // 50
    lie = paths(batch.to(torch.device("cpu")))
    for row, group in differ:
        path = torch.from_numpy(lie[row]).to(device)
        entries = plain.table.ended[path[grid.length - 1 :: grid.stride]] - 1
        of_group = slice(group * (sizes.heads // sizes.groups), (group + 1) * (sizes.heads // sizes.groups))
        scores = query[row, of_group].double() @ keys[entries, group].double().T * sizes.scale
        of_block = _by_block(scores.softmax(1).sum(0), (len(path) - 1) // grid.select + 1, grid)
        ours, theirs = (set(t[row, group].tolist()) for t in (found, wanted))
        assert len(ours) == len(theirs) == choice.count
        worst, best = (of_block[sorted(one - other)] for one, other in ((ours, theirs), (theirs, ours)))
        assert worst.min() >= best.max() * (1 - 1e-5), (row, group)
