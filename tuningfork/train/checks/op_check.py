"""Each op of a model's mixers by itself, on what this model gives it: its fast form beside the plain one.

What may lie between them is measured by the plain form, once in float32 and once with operands and results rounded as a
fast kernel rounds them. Rows of padding are left out, as nobody uses them: they are one token over and over, whose keys
are all the same, and rounding is then as large as what is left of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tuningfork.models.policy import Policy
from tuningfork.records import ForkLayout, PackedBatch
from tuningfork.train.checks.rounding import FLOOR, check_rounding, noise, rounded, rounded_products, wrong

Call = Callable[..., "Tensor | tuple[Tensor, ...]"]
"""(prepared form, tensors...) -> outputs."""


def check_ops(policy: Policy, batch: PackedBatch, path: str) -> None:
    """Every call of every op of the mixers in a forward pass, with its own arguments; outputs and gradients.

    Raises:
        ModelError: one is wrong; it names the kernel, the call and the quantity.
    """
    watched = Policy.plain(policy.model, policy.dtype, policy.spread)
    beside = {
        op: _BESIDE[op](
            watched.kernels[op], policy.kernels[op], f"{path}: {words} {policy.kernels.names[op]}", batch.used_slots
        )
        for op, words in _WORDS.items()
        if op in watched.ops
    }
    watched.kernels = replace(watched.kernels, forms={**watched.kernels.forms, **beside})
    with torch.no_grad():
        watched.hidden_rows(batch)


class _Beside:
    """A plain form that has another do the same, forward and backward, and compares."""

    def __init__(self, plain: Any, other: Any, what: str, used: int) -> None:
        """`used`: of a pack's rows, those that are no padding; they come first."""
        self._kinds = plain, other
        self._what, self._calls, self._used = what, 0, used

    def prepare(self, layout: ForkLayout) -> Any:
        self._positions = layout.position_of_row
        self._plain, self._other = (kind.prepare(layout) for kind in self._kinds)
        return self

    def compare(
        self,
        call: Call,
        given: dict[str, Tensor],
        outputs: Sequence[str],
        few: Sequence[str] = (),
        scale: float | None = None,
        of_rows: bool = True,
    ) -> tuple[str, list[Tensor], list[Tensor]]:
        """Check one call.

        Args:
            call: has a form compute of `given` what is compared.
            given: tensors, by what their gradients are called.
            outputs: what the results are called.
            few: which of `given` have so few numbers that the plain form's rounding may be little by chance.
            scale: of softmax attention, whose queries, keys and values are the first of `given` and whose only result
                is what it reads.
            of_rows: whether results have a line for each row of the pack.

        Returns:
            What is compared, and the results and gradients of the plain form in float32, and of the other.
        """
        self._calls += 1
        tensors = list(given.values())
        wide, dtype = [t.float() for t in tensors], tensors[0].dtype
        exact = self.through(call, self._plain, wide, of_rows)
        with rounded_products(dtype):
            usual = self.through(call, self._plain, wide, of_rows)
        if scale is not None:
            lost = self._by_rounded_results(call, scale, exact[0], wide, dtype)
            usual[1:3] = [t + of_it for t, of_it in zip(usual[1:3], lost, strict=True)]
        usual = [rounded(t, dtype) for t in usual]
        found = self.through(call, self._other, tensors, of_rows)
        gradients = [float(t.double().norm()) for t in exact[len(outputs) :]]
        # A gradient that is 0 but for rounding, such as that of scores of a single key, has no size to go by.
        floors = [0.0] * len(outputs) + [FLOOR * 1e-2 * max(gradients)] * len(given)
        what = f"{self._what}, call {self._calls}"
        names = [*outputs, *(f"gradients of {name}" for name in given)]
        unit = torch.finfo(dtype).eps
        more = [0.0] * len(outputs) + [unit * (name in few) for name in given]
        for name, f, u, e, floor, part in zip(names, found, usual, exact, floors, more, strict=True):
            check_rounding(what, name, f, u, e, floor + part * float(e.double().norm()))
        return what, exact, found

    def through(self, call: Call, form: Any, given: Sequence[Tensor], of_rows: bool = True) -> list[Tensor]:
        """`through` a call of a form, of rows that are no padding."""

        def used(*tensors: Tensor) -> tuple[Tensor, ...]:
            out = call(form, *tensors)
            results = out if isinstance(out, tuple) else (out,)
            return tuple(t[: self._used] for t in results) if of_rows else results

        return through(used, given)

    def _by_rounded_results(
        self, attend: Call, scale: float, out: Tensor, given: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What gradients of queries and keys lose where attention's results are there in a dtype alone.

        A score's gradient is P (dP - D). Kernels take D, the sum of a row's dP by its weights P, from the row's result
        and its gradient (FlashAttention, arXiv:2205.14135, equation 4). What D is off by comes to a query's gradient
        times the mean of its keys, and to each key's times the query and P: little, unless keys, or values, are alike.

        Args:
            out: float32 [used rows, H, dv], of which `through` took the gradient of a sum by noise.
            given: queries, keys and values, float32, and what else `attend` is given.
        """
        query, key, _, *more = given
        off = ((out.to(dtype).float() - out) * noise(out, seed=1)).sum(-1)
        off = torch.cat([off, off.new_zeros(len(query) - len(off), off.shape[1])])[..., None]
        keys = key.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(key.device.type, enabled=False):
            mean: Any = attend(self._plain, query, key, keys, *more)
            mean = scale * mean
            (of_keys,) = torch.autograd.grad(mean, keys, off * query)
        return -off * mean.detach(), -of_keys


class _Attention(_Beside):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None, **how: Any) -> Tensor:
        given = {"queries": query, "keys": key, "values": value, **({} if sinks is None else {"sinks": sinks})}

        def attend(form: Any, *tensors: Tensor) -> Tensor:
            rows, its_sinks = tensors[:3], tensors[3:]
            out: Tensor = form.attend(*rows, **how, **({"sinks": its_sinks[0]} if its_sinks else {}))
            return out

        what, exact, found = self.compare(attend, given, ["outputs"], few=["sinks"], scale=how["scale"])
        edge = self._at_the_windows_edge(how["window"])
        if edge:  # one key more or less is one of many, which only float32 shows
            again = found
            if query.dtype != torch.float32:
                again = self.through(attend, self._other, [t.float() for t in given.values()])
            floor = FLOOR * 1e-2 * max(float(t.double().norm()) for t in exact[1:])
            for name, f, e in zip(("outputs", *(f"gradients of {name}" for name in given)), again, exact, strict=True):
                if name in edge:
                    f, e = f[edge[name]], e[edge[name]]
                    check_rounding(f"{what}, beyond its window", name, f, e, e, floor)
        return attend(self._plain, *given.values())

    def _at_the_windows_edge(self, window: int | None) -> dict[str, Tensor]:
        """The rows [n] whose numbers a window decides, by quantity: few of all, among whom an error of theirs is lost.

        Those are the outputs and queries' gradients of rows that do not see their whole sequence, and the gradients of
        keys and values that some later row of the longest sequence does not see.
        """
        positions = self._positions[: self._used]
        last = int(positions.max())
        if window is None or last < window:
            return {}
        rows, keys = (positions >= window).nonzero()[:, 0], (positions + window <= last).nonzero()[:, 0]
        late, early = ("outputs", "gradients of queries"), ("gradients of keys", "gradients of values")
        return {**dict.fromkeys(late, rows), **dict.fromkeys(early, keys)}


class _CausalConv(_Beside):
    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = True) -> Tensor:
        given = {"channels": x, "weights": weight, **({} if bias is None else {"biases": bias})}

        def convolve(form: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out: Tensor = form.conv(x, weight, bias, silu=silu)
            return out

        self.compare(convolve, given, ["outputs"])
        return convolve(self._plain, *given.values())

    def query_key_value(self, x: Tensor, weight: Tensor, heads: Any) -> tuple[Tensor, ...]:
        def split(form: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            parts: tuple[Tensor, ...] = form.query_key_value(x, weight, heads)
            return parts

        self.compare(split, {"channels": x, "weights": weight}, ["queries", "keys", "values"])
        return split(self._plain, x, weight)


class _GatedDelta(_Beside):
    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        given = {"queries": query, "keys": key, "values": value, "decays": decay, "betas": beta}
        self.compare(lambda form, *rows: form.scan(*rows), given, ["outputs"])
        out: Tensor = self._plain.scan(*given.values())
        return out


class _Ccgqa(_Beside):
    def query_key(self, x: Tensor, filters: Any, temperature: Tensor, heads: Any) -> tuple[Tensor, ...]:
        names = ["depthwise filters", "grouped filters", "first biases", "second biases"]
        weights = {name: t for name, t in zip(names, filters, strict=True) if t is not None}

        def split(form: Any, x: Tensor, temperature: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            parts: tuple[Tensor, ...] = form.query_key(x, type(filters)(*weights), temperature, heads)
            return parts

        given = {"channels": x, "temperatures": temperature, **weights}
        self.compare(split, given, ["queries", "keys"], few=["temperatures"])
        return split(self._plain, *given.values())

    def values(self, x: Tensor, now: int) -> Tensor:
        self.compare(lambda form, x: form.values(x, now), {"values": x}, ["values shifted"])
        out: Tensor = self._plain.values(x, now)
        return out


class _Nsa(_Beside):
    def prepare(self, layout: ForkLayout, grid: Any = None) -> Any:  # this op has a grid, too
        self._grid, self._positions = grid, layout.position_of_row
        self._plain, self._other = (kind.prepare(layout, grid) for kind in self._kinds)
        found, expected = self._other.first_positions, self._plain.first_positions
        if not torch.equal(found.to(expected), expected):
            raise wrong(f"{self._what}: compressed blocks begin at other positions than those of the plain kernel.")
        return self

    @property
    def first_positions(self) -> Tensor:
        first: Tensor = self._plain.first_positions
        return first

    def blocks(self, rows: Tensor) -> Tensor:
        self.compare(lambda form, rows: form.blocks(rows), {"rows": rows}, ["rows of blocks"], of_rows=False)
        out: Tensor = self._plain.blocks(rows)
        return out

    def mean(self, rows: Tensor) -> Tensor:
        self.compare(lambda form, rows: form.mean(rows), {"rows": rows}, ["means of blocks"], of_rows=False)
        out: Tensor = self._plain.mean(rows)
        return out

    def compressed(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, choice: Any
    ) -> tuple[Tensor, Tensor]:
        def attend(form: Any, *tensors: Tensor) -> Tensor:
            return form.compressed(*tensors, scale=scale, choice=choice)[0]  # type: ignore[no-any-return]

        given = {"queries": query, "keys of blocks": keys, "values of blocks": values}
        what, _, _ = self.compare(attend, given, ["compressed outputs"], scale=scale)
        wide = [t.float() for t in given.values()]
        _, expected = self._plain.compressed(*wide, scale=scale, choice=choice)
        _, found = self._other.compressed(*given.values(), scale=scale, choice=choice)
        _check_choices(what, found, expected, self._scores(wide[0], wide[1], scale, choice))
        out, _ = self._plain.compressed(*given.values(), scale=scale, choice=choice)
        return out, expected

    def selected(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
        def attend(form: Any, *tensors: Tensor) -> Tensor:
            out: Tensor = form.selected(*tensors, chosen, scale=scale)
            return out

        given = {"queries": query, "keys": key, "values": value}
        self.compare(attend, given, ["selected outputs"], scale=scale)
        return attend(self._plain, *given.values())

    def _scores(self, query: Tensor, keys: Tensor, scale: float, choice: Any) -> Tensor:
        """What blocks are chosen by, [T, G, J]: infinite for those that are no choice, -1 for those ahead of a row.

        A block's score is what compressed attention reads where the value of each compressed block is how many of its
        strides lie in the block, added up over the heads of a group (equation 9).
        """
        (length, stride, select), first = self._grid, self.first_positions[:, None]
        own = self._positions // select
        block = torch.arange(int(own.max()) + 1, device=own.device)
        end = torch.minimum(first + length, (block + 1) * select)
        strides = (end - torch.maximum(first, block * select)).clamp(min=0) // stride
        values = strides[:, None].expand(-1, keys.shape[1], -1).to(keys)
        of_heads, _ = self._plain.compressed(query, keys, values, scale=scale, choice=choice)
        ahead = (own[:, None] - block)[:, None]
        scores: Tensor = of_heads.unflatten(1, (keys.shape[1], -1)).sum(2)
        scores = scores.masked_fill((block < choice.initial) | (ahead < choice.local), torch.inf)
        return scores.masked_fill(ahead < 0, -1)


def _check_choices(what: str, found: Tensor, expected: Tensor, scores: Tensor) -> None:
    """Blocks [T, G, n], from low to high and then -1, are the best by scores [T, G, J]; of those whose scores are as
    good as equal, any. Raises ModelError where they are not."""
    blocks = scores.shape[2]

    def among(chosen: Tensor) -> Tensor:
        places = torch.where((chosen < 0) | (chosen >= blocks), blocks, chosen).long()
        room = torch.zeros(*scores.shape[:2], blocks + 1, dtype=torch.bool, device=scores.device)
        return room.scatter_(2, places, True)[..., :-1]

    ours, theirs = among(found), among(expected)
    lost = scores.masked_fill(~theirs | ours, -torch.inf).amax(-1)
    gained = scores.masked_fill(~ours | theirs, torch.inf).amin(-1)
    filled = (found >= 0) == (expected >= 0)
    usable = filled.all(-1) & (ours.sum(-1) == theirs.sum(-1)) & _rises(found)
    bad = (~usable | ~(gained >= lost * (1 - FLOOR))).nonzero()
    if len(bad):
        row, group = bad[0].tolist()
        chosen, better = ([b for b in t[row, group].tolist() if b >= 0] for t in (found, expected))
        raise wrong(
            f"{what}: choices of blocks are not those with the highest scores in {len(bad):,} of {lost.numel():,} "
            f"cases; row {row} chooses {chosen} for group {group}, and the plain kernel {better}."
        )


def _rises(chosen: Tensor) -> Tensor:
    """Whether blocks [..., n] lie from low to high, with -1 behind them."""
    last = torch.iinfo(chosen.dtype).max
    return (chosen.masked_fill(chosen < 0, last).diff(dim=-1) >= 0).all(-1)


_BESIDE: dict[str, type[_Beside]] = {
    "attention": _Attention,
    "causal_conv": _CausalConv,
    "ccgqa": _Ccgqa,
    "gated_delta": _GatedDelta,
    "nsa": _Nsa,
}
_WORDS = {
    "attention": "attention kernel",
    "causal_conv": "convolution kernel",
    "ccgqa": "CCGQA kernel",
    "gated_delta": "scan kernel",
    "nsa": "sparse attention kernel",
}


def through(op: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of an op, and the gradients of a fixed sum of them by what it is given; float32."""
    leaves = [t.detach().requires_grad_() for t in given]
    # Autocast, under which the model runs, would take float32 for bfloat16 here.
    with torch.enable_grad(), torch.autocast(leaves[0].device.type, enabled=False):
        out = op(*leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        upstream = [noise(t, seed=1 + place) for place, t in enumerate(outputs)]
        # What it does not depend on has a gradient of 0, which the others' then say is wrong.
        gradients = torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)
    return [t.detach().float() for t in (*outputs, *gradients)]
