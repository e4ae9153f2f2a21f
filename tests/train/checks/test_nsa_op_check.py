"""The op of native sparse attention beside the plain one: what is wrong is named, what only rounds otherwise passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import SPARSE, tiny_model, with_form
from tests.train.checks.test_op_check import DTYPES, half
from tuningfork.errors import ModelError
from tuningfork.kernels.nsa.plain import PlainNsa
from tuningfork.models.policy import Policy
from tuningfork.train.checks.kernel_check import KernelCheck

Change = Callable[..., Any]


def begin(family: str, dtype: torch.dtype, **changed: Change) -> tuple[Policy, KernelCheck]:
    """A start with a form that has, for some functions of the plain one, others of it and their arguments."""

    class Other(PlainNsa):
        def blocks(self, rows):
            return changed.get("blocks", as_it_is)(super().blocks, rows)

        def mean(self, rows):
            return changed.get("mean", as_it_is)(super().mean, rows)

        def compressed(self, *given, **how):
            form = self._replace(grid=changed["grid"](self.grid)) if "grid" in changed else self

            def plain(*tensors):
                return PlainNsa.compressed(form, *tensors, **how)

            return changed.get("compressed", as_it_is)(plain, *given)

        def selected(self, query, key, value, chosen, **how):
            def plain(*tensors):
                return PlainNsa.selected(self, *tensors, changed.get("chosen", as_given)(chosen), **how)

            return changed.get("selected", as_it_is)(plain, query, key, value)

    if "first_positions" in changed:
        Other.first_positions = property(lambda self: changed["first_positions"](self.table.first_positions))
    kernels = with_form("nsa", Other)
    kernels = replace(kernels, names=dict.fromkeys(kernels.names, "other"))
    policy = Policy(tiny_model(family, torch.float32), kernels, dtype)
    return policy, KernelCheck.begin(policy, "here", "prompt", compiling=False)


def as_given(chosen: Tensor) -> Tensor:
    return chosen


def as_it_is(plain: Change, *given: Tensor) -> Any:
    return plain(*given)


def finely(plain: Change, *given: Tensor) -> Any:
    out = plain(*(t.double() for t in given))
    return (out[0].to(given[0].dtype), out[1]) if isinstance(out, tuple) else out.to(given[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SPARSE)
def test_kernels_that_only_round_otherwise_pass(family, dtype):
    policy, check = begin(family, dtype, **dict.fromkeys(["blocks", "mean", "compressed", "selected"], finely))
    check.compare(policy)


GRADIENTS = {
    "blocks": ("nsa", ["rows"]),
    "mean": ("nsa_mean", ["rows"]),
    "compressed": ("nsa", ["queries", "keys of blocks", "values of blocks"]),
    "selected": ("nsa", ["queries", "keys", "values"]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "place"), [(name, n) for name, (_, of) in GRADIENTS.items() for n in range(len(of))]
)
def test_a_wrong_gradient_is_named(function, place, dtype):
    family, names = GRADIENTS[function]
    words = (
        rf"^here: sparse attention kernel other, call \d: gradients of {names[place]} are [45]\.\de-01 of their size"
    )
    with pytest.raises(ModelError, match=words):
        begin(family, dtype, **{function: half(place)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "family", "words"),
    [
        ("blocks", "nsa", "call 1: rows of blocks are"),
        ("mean", "nsa_mean", "call 1: means of blocks are"),
        ("selected", "nsa", "call 4: selected outputs are"),
    ],
)
def test_a_wrong_output_of_two_rows_is_named(function, family, words, dtype):
    def wrong(plain, *given):
        out = plain(*given)
        return torch.cat([out[:8], out[8:10] * 0, out[10:]])

    with pytest.raises(ModelError, match=f"^here: sparse attention kernel other, {words}"):
        begin(family, dtype, **{function: wrong})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_read_before_it_is_complete_is_named(dtype):
    with pytest.raises(ModelError, match="kernel other, call 3: compressed outputs are"):
        begin("nsa", dtype, grid=lambda grid: grid._replace(length=grid.length - 1))


def of_the_lowest_scores(plain: Change, query: Tensor, keys: Tensor, values: Tensor) -> Any:
    return plain(query, keys, values)[0], plain(-query, keys, values)[1]


def without_their_own(plain: Change, *given: Tensor) -> Any:
    out, chosen = plain(*given)
    own = (chosen >= 0).sum(-1, keepdim=True) - 1
    return out, chosen.scatter(-1, own, -1)


def by_the_keys_before(plain: Change, query: Tensor, keys: Tensor, values: Tensor) -> Any:
    return plain(query, keys, values)[0], plain(query, keys.roll(1, 0), values)[1]


def from_high_to_low(plain: Change, *given: Tensor) -> Any:
    out, chosen = plain(*given)
    return out, chosen.sort(-1, descending=True).values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [of_the_lowest_scores, without_their_own, by_the_keys_before, from_high_to_low])
def test_a_wrong_choice_is_named_with_a_row_that_has_it(wrong, dtype):
    words = (
        r"kernel other, call 3: choices of blocks are not .* cases; row \d+ chooses \[[\d, ]*\] for group \d, and the"
    )
    with pytest.raises(ModelError, match=words) as caught:
        begin("nsa", dtype, compressed=wrong)
    assert f"PyTorch {torch.__version__}" in str(caught.value)


def test_blocks_that_begin_elsewhere_are_named():
    with pytest.raises(ModelError, match="kernel other: compressed blocks begin at other positions than"):
        begin("nsa", torch.float32, first_positions=lambda first: first + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_attention_that_leaves_a_block_out_is_named(dtype):
    with pytest.raises(ModelError, match="kernel other, call 4: selected outputs are"):
        begin("nsa", dtype, chosen=lambda chosen: chosen.masked_fill(chosen == 0, -1))
