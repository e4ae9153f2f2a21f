"""What tests of the causal convolution's forms share: inputs that a row's path decides, checks of bits and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tests.forests import Known, no_worse, normal, paths
from tuningfork.kernels.causal_conv.plain import Heads, PlainCausalConv
from tuningfork.records import PackedBatch

HEADS = Heads(2, 6, 4, 5)


class Conv(NamedTuple):
    """What a call of the convolution may ask for. With heads it is `query_key_value`."""

    width: int = 4
    silu: bool = True
    has_bias: bool = False
    heads: Heads | None = None

    @property
    def channels(self) -> int:
        if self.heads is None:
            return 10
        return 2 * self.heads.keys * self.heads.key_width + self.heads.values * self.heads.value_width

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of a row of each result."""
        if self.heads is None:
            return [(self.channels,)]
        keys, key_width, values, value_width = self.heads
        return [(keys, key_width), (keys, key_width), (values, value_width)]

    @property
    def names(self) -> list[str]:
        results = ["out"] if self.heads is None else ["query", "key", "value"]
        return [*results, "d x", "d weight", *(["d bias"] * self.has_bias)]


def given(
    numbers: torch.Tensor, case: Conv, dtype: torch.dtype, device: str = "cpu", rounded: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Leaves x, weight and, if there is one, bias; and gradients of the results. A row's are those of its number.

    `rounded` is a dtype to which all are rounded before; else `dtype`.
    """
    constants = torch.arange(case.channels)
    tensors = [normal(numbers, case.channels, seed=0), normal(constants, case.width, seed=1)]
    tensors += [normal(constants, seed=2)] * case.has_bias
    upstream = [normal(numbers, *shape, seed=3 + n) for n, shape in enumerate(case.shapes)]
    leaves, upstream = ([t.to(rounded or dtype).to(device, dtype) for t in some] for some in (tensors, upstream))
    return [t.requires_grad_() for t in leaves], upstream


def convolved(form: Any, batch: PackedBatch, case: Conv, x, weight, bias=None) -> list[torch.Tensor]:
    """What a form makes of a pack: its results."""
    prepared = form.prepare(batch.layout)
    if case.heads is None:
        return [prepared.conv(x, weight, bias, case.silu)]
    return list(prepared.query_key_value(x, weight, case.heads))


def check_paths_decide_bits(
    form: Any, packs: Sequence[PackedBatch], case: Conv, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Rows of equal paths have equal results, in whichever pack they lie; and the gradients of x are equal where the
    same rows read a row, in the same order."""
    known = Known()
    seen: dict[tuple[Any, ...], torch.Tensor] = {}
    met = 0
    for batch in packs:
        numbers = known.rows(batch)
        leaves, upstream = given(numbers, case, dtype, device)
        out = convolved(form, batch.to(torch.device(device)), case, *leaves)
        [d_x] = torch.autograd.grad(out, leaves[:1], upstream)
        readers: list[list[int]] = [[] for _ in numbers]
        for number, path in zip(numbers.tolist(), paths(batch), strict=True):
            for row in path[-case.width :]:
                readers[row].append(number)
        results = torch.cat([t.detach().cpu().flatten(1) for t in out], 1)
        for row, number in enumerate(numbers.tolist()):
            for key, ours in (((number,), results[row]), ((number, *readers[row], "d x"), d_x[row].cpu())):
                assert ours.isfinite().all()
                met += key in seen
                assert torch.equal(seen.setdefault(key, ours), ours)
    assert met > 2 * len(packs[0].input_ids)


def check_neighbours_change_nothing(
    form: Any, batch: PackedBatch, case: Conv, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Numbers of 1e3 are planted before each segment in turn, in all rows but those of its path: its results keep their
    bits. Padding is a segment, too."""
    leaves, _ = given(Known().rows(batch), case, dtype, device)
    x, *weights = (t.detach() for t in leaves)
    whole, there = paths(batch), batch.to(torch.device(device))
    clean = convolved(form, there, case, x, *weights)
    for start, end in batch.layout.segments[:, :2].tolist():
        if start == end:
            continue
        planted = x.clone()
        planted[:start:2], planted[1:start:2] = 1e3, -1e3
        planted[whole[end - 1]] = x[whole[end - 1]]
        found = convolved(form, there, case, planted, *weights)
        assert all(torch.equal(a[start:end], b[start:end]) for a, b in zip(found, clean, strict=True))


def check_error_and_repeat(form: Any, batch: PackedBatch, case: Conv, dtype: torch.dtype, device: str = "cpu") -> None:
    """A form's error to the truth is at most twice the plain one's, and another run has the same bits."""
    numbers = Known().rows(batch)
    batch = batch.to(torch.device(device))

    def run(kind: Any, its_dtype: torch.dtype) -> list[torch.Tensor]:
        leaves, upstream = given(numbers, case, its_dtype, device, rounded=dtype)
        out = convolved(kind, batch, case, *leaves)
        return [*(t.detach() for t in out), *torch.autograd.grad(out, leaves, upstream)]

    ours, again, plain = run(form, dtype), run(form, dtype), run(PlainCausalConv, dtype)
    truth = run(PlainCausalConv, torch.float64)
    for name, o, a, p, t in zip(case.names, ours, again, plain, truth, strict=True):
        no_worse(o, p, t, name)
        assert torch.equal(o, a), f"{name}: another run has other bits"
