"""What tests of CCGQA's op share: inputs that a row's path decides, a loop from the definition, checks of forms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tests.forests import Known, no_worse, normal, paths
from tuningfork.kernels.ccgqa.plain import Filters, PlainCcgqa, QueryHeads
from tuningfork.records import PackedBatch

# Prompts of 0 to 5 rows, around all that a convolution reads, with answers of 1, 2, 3 and more, one, two and three.
SHAPES = [
    *((p, answers) for p, answers in enumerate([(1, 2, 3), (1,), (2, 1), (3, 3, 1), (9,), (2, 3)])),
    (0, (7,)),
    (1, (1, 1, 1)),
    (13, (5, 9)),
]


class Case(NamedTuple):
    """What a call of the op may ask for."""

    keys: int = 2
    group: int = 2
    width: int = 6
    depthwise: int = 2
    grouped: int = 2
    biased: bool = True

    @property
    def heads(self) -> QueryHeads:
        return QueryHeads(self.keys * self.group, self.keys, self.width)

    @property
    def channels(self) -> int:
        return self.keys * (self.group + 1) * self.width

    @property
    def names(self) -> list[str]:
        weights = ["x", "values", "depthwise", "grouped", "temperature", *["first bias", "second bias"] * self.biased]
        return ["query", "key", "value", *(f"d {name}" for name in weights)]


def given(
    numbers: torch.Tensor, case: Case, dtype: torch.dtype, device: str = "cpu", rounded: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Leaves: x, values, both filters, temperature, and biases if there are any; and gradients of the results. A row's
    are those of its number. The temperature is in float32 at least, all else in `dtype`, rounded to `rounded` first."""
    channels, values = torch.arange(case.channels), case.keys * case.width
    weights = normal(channels, case.width, case.grouped, seed=3) / (case.width * case.grouped) ** 0.5
    leaves = [
        normal(numbers, case.channels, seed=0),
        normal(numbers, values, seed=1),
        normal(channels, case.depthwise, seed=2),
        weights,
        0.5 * normal(torch.arange(case.keys), seed=4),
        *[normal(channels, seed=5), normal(channels, seed=6)][: 2 * case.biased],
    ]
    shapes = (case.heads.queries, case.width), (case.keys, case.width), (values,)
    upstream = [normal(numbers, *shape, seed=7 + n) for n, shape in enumerate(shapes)]
    wide = torch.promote_types(dtype, torch.float32)
    leaves, upstream = (
        [t.to(rounded or dtype).to(device, wide if len(t) == case.keys else dtype) for t in some]
        for some in (leaves, upstream)
    )
    return [t.requires_grad_() for t in leaves], upstream


def applied(form: Any, batch: PackedBatch, case: Case, x, values, depthwise, grouped, temperature, *biases):
    """What a form makes of a pack: query, key and value."""
    prepared = form.prepare(batch.layout)
    filters = Filters(depthwise, grouped, *biases)
    query, key = prepared.query_key(x, filters, temperature, case.heads)
    return [query, key, prepared.values(values, values.shape[1] // 2)]


def looped(batch: PackedBatch, case: Case, x, values, depthwise, grouped, temperature, *biases):
    """One row at a time, from the definition: its path is all that there is."""
    heads, none = case.heads, x.new_zeros(x.shape[1])
    first, second = biases or (none, none)
    grouped = grouped.view(-1, case.width, case.width, case.grouped)
    out: list[list[torch.Tensor]] = [[], [], []]
    for path in paths(batch):
        # From the row itself back: u, and what the first convolution makes of it, where there is no row, too.
        latent = [x[row] for row in path[::-1]] + [none] * 8
        convolved = [
            first + sum(depthwise[:, -1 - j] * latent[back + j] for j in range(case.depthwise))
            for back in range(case.grouped)
        ]
        row = second.view(-1, case.width)
        for back, channels in enumerate(convolved):
            row = row + (grouped[..., -1 - back] @ channels.view(-1, case.width, 1))[..., 0]
        q0, k0 = latent[0].view(-1, case.width).split([heads.queries, heads.keys])
        mean = torch.stack([(q0[a] + k0[a // case.group]) / 2 for a in range(heads.queries)])
        for a in range(heads.queries + heads.keys):
            b = a - heads.queries
            added = mean[a] if b < 0 else mean[b * case.group : (b + 1) * case.group].mean(0)
            head = row[a] + added
            head = case.width**0.5 * head / head.square().sum().sqrt()
            out[b >= 0].append(head if b < 0 else head * temperature[b].exp())
        half = values.shape[1] // 2
        old = values[path[-2], half:] if len(path) > 1 else none[: values.shape[1] - half]
        out[2].append(torch.cat([values[path[-1], :half], old]))
    query, key, value = (torch.stack(part) for part in out)
    return [query.view(len(x), -1, case.width), key.view(len(x), -1, case.width), value]


def with_gradients(results: list[torch.Tensor], leaves, upstream) -> list[torch.Tensor]:
    return [*(t.detach() for t in results), *torch.autograd.grad(results, leaves, upstream)]


def check_paths_decide_bits(form: Any, packs, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows of equal paths have equal results, in whichever pack they lie."""
    known, met = Known(), 0
    seen: dict[int, torch.Tensor] = {}
    for batch in packs:
        numbers = known.rows(batch)
        leaves, _ = given(numbers, case, dtype, device)
        out = applied(form, batch.to(torch.device(device)), case, *leaves)
        results = torch.cat([t.detach().cpu().flatten(1) for t in out], 1)
        assert results.isfinite().all()
        for row, number in enumerate(numbers.tolist()):
            met += number in seen
            assert torch.equal(seen.setdefault(number, results[row]), results[row])
    assert met > len(packs[0].input_ids)


def check_neighbours_change_nothing(form: Any, batch: PackedBatch, case: Case, dtype, device: str = "cpu") -> None:
    """Numbers of 1e3 are planted in all rows but those of one segment's path: its results keep their bits."""
    leaves, _ = given(Known().rows(batch), case, dtype, device)
    x, values, *weights = (t.detach() for t in leaves)
    whole, there = paths(batch), batch.to(torch.device(device))
    clean = applied(form, there, case, x, values, *weights)
    for start, end in batch.layout.segments[:, :2].tolist():
        if start == end:
            continue
        planted = []
        for rows in (x, values):
            other = torch.full_like(rows, 1e3)
            other[1::2] *= -1
            other[whole[end - 1]] = rows[whole[end - 1]]
            planted.append(other)
        found = applied(form, there, case, *planted, *weights)
        assert all(torch.equal(a[start:end], b[start:end]) for a, b in zip(found, clean, strict=True))


def check_error_and_repeat(form: Any, batch: PackedBatch, case: Case, dtype, device: str = "cpu") -> None:
    """A form's error to the truth is at most twice the plain one's, and another run has the same bits."""
    numbers = Known().rows(batch)
    batch = batch.to(torch.device(device))

    def run(kind: Any, its_dtype: torch.dtype) -> list[torch.Tensor]:
        leaves, upstream = given(numbers, case, its_dtype, device, rounded=dtype)
        return with_gradients(applied(kind, batch, case, *leaves), leaves, upstream)

    ours, again, plain = run(form, dtype), run(form, dtype), run(PlainCcgqa, dtype)
    truth = run(PlainCcgqa, torch.float64)
    for name, o, a, p, t in zip(case.names, ours, again, plain, truth, strict=True):
        assert torch.equal(o, a), f"{name}: another run has other bits"
        if name == "d temperature":  # so few numbers that the plain form's may be exact by chance
            # It is the sum of keys times their upstream gradients, and so loses what keys lose: at most twice as much
            # as the plain form's, as asserted above. Errors of rows are independent, so that they add up to less than
            # twice the root of the sum of their squares.
            _, upstream = given(numbers, case, torch.float64, device, rounded=dtype)
            lost = (upstream[1] * (plain[1].double() - truth[1])).norm()
            assert (o.double() - t).norm() <= 2 * 2 * lost, name
        else:
            no_worse(o, p, t, name)
