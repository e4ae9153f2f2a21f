"""At every start: do the kernels and compiled blocks that will train have the numbers of plain ones, on this device?

Tests show that a kernel is right on the cards and compilers that they ran on. A new card, driver or compiler may break
one, and then a run trains on numbers that are only a little wrong. So the run's own model takes a pack through both.

Each kernel is tried by itself first (op_check.py); how far numbers may lie apart is in rounding.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tuningfork.data.packing.tree import Share
from tuningfork.errors import LOADING, enough_memory
from tuningfork.models.policy import Policy, Spread
from tuningfork.records import PackedBatch
from tuningfork.train.checks.op_check import check_ops
from tuningfork.train.checks.rounding import FLOOR, check_rounding, farther, noise, relative, rounded_products
from tuningfork.train.checks.self_check import in_float32, probe_pack, probes

_DIRECTIONS = 16  # of a sketch: the size of a gradient of rank one is then met within a fifth, of others much closer


@dataclass(frozen=True)
class _Numbers:
    """One way through the model, float32 on the CPU.

    hidden: [R, D], final hidden states of the logit rows.
    d_embedded: [1, T, D], gradient of a fixed sum of them by the embedded tokens: it has come through every block.
    d_weights: by name, `_sketch` of that sum's gradient by each weight on the way.
    """

    hidden: Tensor
    d_embedded: Tensor
    d_weights: dict[str, Tensor]

    def farther(self, other: _Numbers, exact: _Numbers) -> _Numbers:
        """Of each quantity the one of two that lies farther from the exact: both are how plain kernels round."""
        return _Numbers(
            farther(exact.hidden, self.hidden, other.hidden),
            farther(exact.d_embedded, self.d_embedded, other.d_embedded),
            {
                name: farther(true, self.d_weights[name], other.d_weights[name])
                for name, true in exact.d_weights.items()
            },
        )


@dataclass(frozen=True)
class KernelCheck:
    """The plain kernels' numbers of a pack, before anything is compiled; `compare` holds the run's against them."""

    path: str
    batch: PackedBatch
    exact: _Numbers  # in float32
    usual: _Numbers  # in the run's dtype, products within ops in float32 or in it, whichever lies farther

    @classmethod
    def begin(cls, policy: Policy, path: str, share: Share, compiling: bool) -> KernelCheck:
        """Compare each kernel by itself, on what this model gives it, and measure the plain ones.

        Args:
            share: how much of the pack's examples is laid once, as in training.
            compiling: whether the policy's blocks will be compiled.

        Raises:
            ModelError: a kernel is wrong.
        """
        usual_policy = Policy.plain(policy.model, policy.dtype, policy.spread)
        batch = probe_pack(probes(policy), share, compiling).to(policy.device)
        with enough_memory("checking the kernels", LOADING):
            check_ops(policy, batch, path)
            usual_policy.keep_activations("block")  # where memory is short, it is short here too
            usual = _through(usual_policy, batch)
            with rounded_products(policy.dtype):
                within = usual if policy.dtype == torch.float32 else _through(usual_policy, batch)
            with in_float32(policy.model, policy.spread):
                exact_policy = Policy.plain(policy.model, torch.float32, policy.spread)
                exact_policy.keep_activations("block")
                exact = _through(exact_policy, batch)
            usual_policy.keep_activations("none")
        return cls(path, batch, exact, usual.farther(within, exact))

    def compare(self, policy: Policy) -> None:
        """Take the pack through the policy as it will train. Raises ModelError where its numbers are not the plain."""
        with enough_memory("checking the kernels", LOADING):
            found = _through(policy, self.batch)
        what = f"{self.path}: the {'compiled ' if policy.compiled else ''}blocks"
        check_rounding(what, "hidden states", found.hidden, self.usual.hidden, self.exact.hidden)
        check_rounding(
            what, "gradients of embedded tokens", found.d_embedded, self.usual.d_embedded, self.exact.d_embedded
        )
        kinds = _by_kind(found.d_weights, self.usual.d_weights, self.exact.d_weights)
        sizes = {kind: float(exact.double().norm()) for kind, (_, _, exact) in kinds.items()}
        # What one row's rounding becomes by the time it is back here may decide a kind's error, and be little by chance
        # in the plain kernels' own. All blocks' together, in many numbers, is in the gradient that has come through.
        through = relative(self.usual.d_embedded, self.exact.d_embedded)
        # A gradient that is 0 but for rounding, such as that of a bias of keys, has no size to go by.
        floor = FLOOR * 1e-2 * max(sizes.values(), default=0.0)
        for kind, (f, u, e) in kinds.items():
            check_rounding(what, f"gradients of {kind}", f, u, e, floor + through * sizes[kind])


def _through(policy: Policy, batch: PackedBatch) -> _Numbers:
    if policy.spread is not None:
        policy.spread.release()  # gradients are those of the spread weights
    ways = _weight_gradients(policy.model) if policy.spread is None else _spread_gradients(policy, policy.spread)
    with torch.enable_grad(), _embedded(policy) as embedded, ways as d_weights:
        hidden = policy.hidden_rows(batch, last=True)
        hidden.backward(noise(hidden, seed=0))
    gradient = embedded[0].grad
    assert gradient is not None
    return _Numbers(hidden.detach().float().cpu(), gradient.float().cpu(), d_weights)


@contextmanager
def _weight_gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Sketches of the gradients that a backward pass brings to the weights, by name.

    It is the way that gradients take in training, `train.gradient_dtype` included, but that each of them goes as soon
    as it is there: no more than one block's are held at a time, and none is left.
    """
    sketches: dict[str, Tensor] = {}
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]

    def take(name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        sketches[name], weight.grad = _sketch(weight.grad), None

    hooks = [weight.register_post_accumulate_grad_hook(partial(take, name)) for name, weight in weights]
    try:
        yield sketches
    finally:
        for hook in hooks:
            hook.remove()
        for _, weight in weights:
            weight.grad = None  # of a pass that failed


@contextmanager
def _spread_gradients(policy: Policy, spread: Spread) -> Iterator[dict[str, Tensor]]:
    """The same of weights that are spread over processes, all of which take the same pack: what travels is the sum over
    them, and each weight's is put together in turn."""
    sketches: dict[str, Tensor] = {}
    try:
        yield sketches
        spread.exchange()
        for name, weight in policy.model.named_parameters():
            if weight.grad is not None:
                gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
                sketches[name] = _sketch(gradient / spread.copies)
    finally:
        policy.model.zero_grad(set_to_none=True)


def _sketch(gradient: Tensor) -> Tensor:
    """A gradient [..., n] multiplied with a few random vectors, float32 [..., 16] on the CPU; as it is if that is less.

    All of it is in there, and the sketch of a difference, which is the difference of the sketches, is about as large
    as the difference itself (Johnson and Lindenstrauss 1984). Whole gradients of a large model would be 4 bytes a
    weight, in three copies. Of one that is spread over processes, each looks at its own rows.
    """
    exact = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().float()
    if exact.ndim < 2 or exact.shape[-1] <= _DIRECTIONS:
        return exact.cpu()
    directions = noise(exact.new_empty(exact.shape[-1], _DIRECTIONS), seed=2)
    return (exact @ directions / _DIRECTIONS**0.5).cpu()


def _by_kind(*ways: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The sketches of each way, those of one kind of weight, which is one of each block, as one.

    Blocks run the same code, and some of their weights have too few numbers for their errors to say much alone.
    """
    shapes = {name: sketch.shape for way in ways for name, sketch in way.items()}
    kinds: dict[str, list[str]] = {}
    for name in shapes:
        kinds.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)

    def joined(way: dict[str, Tensor], names: list[str]) -> Tensor:
        # A weight that a pass does not depend on is given no gradient: it is 0.
        return torch.cat([way[name].flatten() if name in way else torch.zeros(shapes[name].numel()) for name in names])

    return {kind: [joined(way, names) for way in ways] for kind, names in kinds.items()}


@contextmanager
def _embedded(policy: Policy) -> Iterator[list[Tensor]]:
    """The embedded tokens of a forward pass, made leaves: gradients of weights are not asked for."""
    seen: list[Tensor] = []

    def cut(module: Any, args: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1].clone()  # some models scale it in place, which a leaf does not allow

    hook = policy.model.get_input_embeddings().register_forward_hook(cut)
    try:
        yield seen
    finally:
        hook.remove()
