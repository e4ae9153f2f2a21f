"""Each op of a model's mixers by itself, on what this model gives it: its fast form beside the plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tuningfork.models.policy import Policy
from tuningfork.records import ForkLayout, PackedBatch
from tuningfork.train.checks.rounding import FLOOR, check_rounding, noise

Call = Callable[..., "Tensor | tuple[Tensor, ...]"]
"""(prepared form, tensors...) -> outputs."""


def check_ops(policy: Policy, batch: PackedBatch, path: str) -> None:
    """Every call of every op of the mixers in a forward pass, with its own arguments; outputs and gradients.

    Raises:
        ModelError: one is wrong; it names the kernel, the call and the quantity.
    """
    watched = Policy.plain(policy.model, policy.dtype, policy.spread)
    beside = {
        op: _BESIDE[op](watched.kernels[op], policy.kernels[op], f"{path}: {words} {policy.kernels.names[op]}")
        for op, words in _WORDS.items()
        if op in watched.ops
    }
    watched.kernels = replace(watched.kernels, forms={**watched.kernels.forms, **beside})
    with torch.no_grad():
        watched.hidden_rows(batch)


class _Beside:
    """A plain form that has another do the same, forward and backward, and compares."""

    def __init__(self, plain: Any, other: Any, what: str) -> None:
        self._kinds = plain, other
        self._what, self._calls = what, 0

    def prepare(self, layout: ForkLayout) -> Any:
        self._positions = layout.position_of_row
        self._plain, self._other = (kind.prepare(layout) for kind in self._kinds)
        return self

    def compare(
        self, call: Call, given: dict[str, Tensor], outputs: Sequence[str], few: Sequence[str] = ()
    ) -> tuple[str, list[Tensor], list[Tensor], list[Tensor]]:
        """Check one call.

        Args:
            call: has a form compute of `given` what is compared.
            given: tensors, by what their gradients are called.
            outputs: what the results are called.
            few: which of `given` have so few numbers that the plain kernels' rounding may be little by chance.

        Returns:
            What is compared, and the results and gradients of the plain form in float32, of the plain form in the
            run's dtype, and of the other.
        """
        self._calls += 1
        tensors = list(given.values())
        exact, usual, found = (
            through(partial(call, form), leaves)
            for form, leaves in (
                (self._plain, [t.float() for t in tensors]),
                (self._plain, tensors),
                (self._other, tensors),
            )
        )
        gradients = [float(t.double().norm()) for t in exact[len(outputs) :]]
        # A gradient that is 0 but for rounding, such as that of scores of a single key, has no size to go by.
        floor = FLOOR * 1e-2 * max(gradients)
        what = f"{self._what}, call {self._calls}"
        names = [*outputs, *(f"gradients of {name}" for name in given)]
        sizes = [0.0] * len(outputs) + [
            torch.finfo(tensors[0].dtype).eps * size if name in few else 0.0
            for name, size in zip(given, gradients, strict=True)
        ]
        for name, f, u, e, more in zip(names, found, usual, exact, sizes, strict=True):
            check_rounding(what, name, f, u, e, floor + more)
        return what, exact, usual, found


class _Attention(_Beside):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None, **how: Any) -> Tensor:
        given = {"queries": query, "keys": key, "values": value, **({} if sinks is None else {"sinks": sinks})}

        def attend(form: Any, *tensors: Tensor) -> Tensor:
            rows, its_sinks = tensors[:3], tensors[3:]
            out: Tensor = form.attend(*rows, **how, **({"sinks": its_sinks[0]} if its_sinks else {}))
            return out

        what, exact, usual, found = self.compare(attend, given, ["outputs"], few=["sinks"])
        edge = self._at_the_windows_edge(how["window"])
        if edge:  # one key more or less is one of many, which only float32 shows
            again = found
            if query.dtype != torch.float32:
                again = through(partial(attend, self._other), [t.float() for t in given.values()])
            floor = FLOOR * 1e-2 * max(float(t.double().norm()) for t in exact[1:])
            for name, f, e in zip(("outputs", *(f"gradients of {name}" for name in given)), again, exact, strict=True):
                if name in edge:
                    f, e = f[edge[name]], e[edge[name]]
                    check_rounding(f"{what}, beyond its window", name, f, e, e, floor)
        return usual[0].to(query.dtype)

    def _at_the_windows_edge(self, window: int | None) -> dict[str, Tensor]:
        """The rows [n] whose numbers a window decides, by quantity: few of all, among whom an error of theirs is lost.

        Those are the outputs and queries' gradients of rows that do not see their whole sequence, and the gradients of
        keys and values that some later row of the longest sequence does not see.
        """
        positions, last = self._positions, int(self._positions.max())
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

        _, _, usual, _ = self.compare(convolve, given, ["outputs"])
        return usual[0].to(x.dtype)

    def query_key_value(self, x: Tensor, weight: Tensor, heads: Any) -> tuple[Tensor, ...]:
        def split(form: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            parts: tuple[Tensor, ...] = form.query_key_value(x, weight, heads)
            return parts

        given, outputs = {"channels": x, "weights": weight}, ["queries", "keys", "values"]
        _, _, usual, _ = self.compare(split, given, outputs)
        return tuple(t.to(x.dtype) for t in usual[: len(outputs)])


class _GatedDelta(_Beside):
    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        given = {"queries": query, "keys": key, "values": value, "decays": decay, "betas": beta}
        _, _, usual, _ = self.compare(lambda form, *rows: form.scan(*rows), given, ["outputs"])
        return usual[0].to(value.dtype)


class _Ccgqa(_Beside):
    def query_key(self, x: Tensor, filters: Any, temperature: Tensor, heads: Any) -> tuple[Tensor, ...]:
        names = ["depthwise filters", "grouped filters", "first biases", "second biases"]
        weights = {name: t for name, t in zip(names, filters, strict=True) if t is not None}

        def split(form: Any, x: Tensor, temperature: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            parts: tuple[Tensor, ...] = form.query_key(x, type(filters)(*weights), temperature, heads)
            return parts

        given = {"channels": x, "temperatures": temperature, **weights}
        _, _, usual, _ = self.compare(split, given, ["queries", "keys"], few=["temperatures"])
        return tuple(t.to(x.dtype) for t in usual[:2])

    def values(self, x: Tensor, now: int) -> Tensor:
        _, _, usual, _ = self.compare(lambda form, x: form.values(x, now), {"values": x}, ["values shifted"])
        return usual[0].to(x.dtype)


_BESIDE: dict[str, type[_Beside]] = {
    "attention": _Attention,
    "causal_conv": _CausalConv,
    "ccgqa": _Ccgqa,
    "gated_delta": _GatedDelta,
}
_WORDS = {
    "attention": "attention kernel",
    "causal_conv": "convolution kernel",
    "ccgqa": "CCGQA kernel",
    "gated_delta": "scan kernel",
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
