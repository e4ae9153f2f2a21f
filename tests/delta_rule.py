"""The gated delta rule row by row, and random inputs of it that depend on a row's path alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tests.forests import MOST_PATHS, Known, normal, paths
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.records import ForkLayout, PackedBatch

NAMES = ["out", "d query", "d key", "d value", "d decay", "d beta"]


class Heads(NamedTuple):
    """Key heads and their width, value heads and theirs."""

    keys: int = 2
    key_width: int = 16
    values: int = 2
    value_width: int = 24


def recurrence(batch: PackedBatch, query, key, value, decay, beta) -> torch.Tensor:
    """The definition: each row's state from that of the row before it in its path. [T, Hv, dv], in their dtype."""
    groups = value.shape[1] // key.shape[1]
    query, key = (t.repeat_interleave(groups, dim=1) for t in (query, key))
    states: list[torch.Tensor] = []
    out = []
    for row, path in enumerate(paths(batch)):
        state = states[path[-2]] if len(path) > 1 else value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
        state = decay[row].exp()[:, None, None] * state
        u = beta[row][:, None] * (value[row] - torch.einsum("hkv,hk->hv", state, key[row]))
        states.append(state + torch.einsum("hk,hv->hkv", key[row], u))
        out.append(torch.einsum("hkv,hk->hv", states[-1], query[row]))
    return torch.stack(out)


def random_inputs(
    numbers: torch.Tensor, heads: Heads, dtype: torch.dtype = torch.float64, decay: float = 1.0
) -> list[torch.Tensor]:
    """Query, key, value, decay and beta of rows, by each row's number alone.

    Args:
        numbers: [T], see forests.Known.
        decay: the mean of the decay's logarithm is minus this; some rows forget much less, some much more.
    """
    wide = torch.promote_types(dtype, torch.float32)
    found = [t[numbers] for t in _inputs_of_all(heads, decay)]
    return [*(t.to(dtype) for t in found[:3]), *(t.to(wide) for t in found[3:])]


@cache
def _inputs_of_all(heads: Heads, decay: float) -> list[torch.Tensor]:
    """Of all rows at once: PyTorch rounds what is last in a tensor otherwise, so a sigmoid depends on its place."""
    everyone = torch.arange(MOST_PATHS)
    query, key = (normal(everyone, heads.keys, heads.key_width, seed=seed) for seed in (0, 1))
    query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    value = normal(everyone, heads.values, heads.value_width, seed=2)
    forget = normal(everyone, heads.values, seed=3).square() * decay
    beta = 2 * normal(everyone, heads.values, seed=4).sigmoid()
    return [query * heads.key_width**-0.5, key, value, -forget, beta]


def scanned(
    form: Any,
    batch: PackedBatch,
    numbers: torch.Tensor,
    heads: Heads,
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
    **how: Any,
) -> list[torch.Tensor]:
    """A form's output, and the gradients of a random sum of it by all inputs; on the layout's device. See NAMES.

    Args:
        rounded: a dtype to which inputs are rounded before; else the same.
    """
    rounded, device = rounded or dtype, batch.layout.position_of_row.device
    given = random_inputs(numbers, heads, rounded, **how)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [t.to(device, wide if n > 2 else dtype).requires_grad_() for n, t in enumerate(given)]
    upstream = normal(numbers, heads.values, heads.value_width, seed=9).to(rounded).to(device, dtype)
    out = form.prepare(batch.layout).scan(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


class Definition:
    """The recurrence as a form of the op: the truth in float64."""

    def __init__(self, batch: PackedBatch) -> None:
        self._batch = batch

    def prepare(self, _: ForkLayout) -> Definition:
        return self

    def scan(self, *given: torch.Tensor) -> torch.Tensor:
        return recurrence(self._batch, *given)


def only_ends(batch: PackedBatch) -> list[int]:
    """Of each row the last one of the only path that has it; -1 if several have, so that its gradients are sums."""
    whole = paths(batch)
    ends = set(range(len(whole))) - {int(path[-2]) for path in whole if len(path) > 1}
    found = [-2] * len(whole)
    for end in ends:
        for row in whole[end].tolist():
            found[row] = end if found[row] == -2 else -1
    return found


def check_paths_decide_bits(
    form: Any, packs: Sequence[PackedBatch], heads: Heads, dtype: torch.dtype, **how: Any
) -> None:
    """Rows of equal paths have equal outputs and gradients of queries, in whichever pack they lie, and how often; and
    all gradients are equal where one path alone has a row, which goes on in the same way."""
    known = Known()
    first: dict[tuple[str, int, int], torch.Tensor] = {}
    met = 0
    for batch in packs:
        cpu = batch.to(torch.device("cpu"))
        numbers, ends = known.rows(cpu), only_ends(cpu)
        found = [t.cpu() for t in scanned(form, batch, numbers, heads, dtype, **how)]
        for place, (name, tensor) in enumerate(zip(NAMES, found, strict=True)):
            assert tensor.isfinite().all(), name
            for row, (number, end) in enumerate(zip(numbers.tolist(), ends, strict=True)):
                if place > 1 and end < 0:
                    continue
                key = (name, number, -1 if place < 2 else int(numbers[end]))
                met += key in first
                assert torch.equal(first.setdefault(key, tensor[row]), tensor[row]), (name, row)
    assert met > 2 * len(packs[0].input_ids)


def check_error_and_repeat(form: Any, batch: PackedBatch, heads: Heads, dtype: torch.dtype, **how: Any) -> None:
    """A fast form is as near to the truth as its dtype allows, and another run has the same bits.

    In float32 every sum is float32, as in the plain form, and the only loss is theirs. In a narrower dtype operands of
    products are rounded, too, each by a third of a unit of its last place as a mean: some ten of them, one after the
    other, lose about one unit of an output's size, and twice as many about twice that of a gradient's.
    """
    numbers = Known().rows(batch.to(torch.device("cpu")))
    ours, again = (scanned(form, batch, numbers, heads, dtype, **how) for _ in range(2))
    truth = scanned(PlainGatedDelta, batch, numbers, heads, torch.float64, rounded=dtype, **how)
    for place, (name, o, a, t) in enumerate(zip(NAMES, ours, again, truth, strict=True)):
        assert torch.isfinite(o).all(), f"{name}: not every element was written"
        unit = torch.finfo(dtype).eps
        bound = 1e-4 if dtype == torch.float32 else (1.3 if place == 0 else 2.6) * unit
        error = ((o.double() - t).norm() / t.norm()).item()
        assert error <= bound, f"{name}: {error:.1e}"
        assert torch.equal(o, a), f"{name}: another run has other bits"
