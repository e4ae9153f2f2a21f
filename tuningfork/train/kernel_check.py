"""At every start: do the kernels and compiled blocks that will train have the numbers of plain ones, on this device?

Tests show that a kernel is right on the cards and compilers that they ran on. A new card, driver or compiler may break
one, and then a run trains on numbers that are only a little wrong. So the run's own model takes a pack through both.

A number is measured against the plain kernels' in float32. What may lie between is known from the plain kernels in the
run's own dtype: they round as often as the fast ones, though not at the same places, so the errors of the two are of
one size, and one that is several times the other is no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tuningfork.errors import ModelError, enough_memory
from tuningfork.models.policy import Policy
from tuningfork.objective.head import Head
from tuningfork.records import ForkLayout, PackedBatch
from tuningfork.train.self_check import in_float32, probe_pack, probes

# The plain kernels' own error, taken over all rows at once: there two errors of a kind are closer than that.
_TIMES = 3.0
# Of a quantity's size: a thousand roundings of float32, for where the plain kernels are the measure itself.
_FLOOR = 1e-4


@dataclass(frozen=True)
class _Numbers:
    """One way through the model, float32 on the CPU.

    hidden: [R, D], final hidden states of the logit rows.
    d_embedded: [1, T, D], gradient of a fixed sum of them by the embedded tokens: it has come through every block.
    """

    hidden: Tensor
    d_embedded: Tensor


@dataclass(frozen=True)
class KernelCheck:
    """The plain kernels' numbers of a pack, before anything is compiled; `compare` holds the run's against them."""

    path: str
    batch: PackedBatch
    exact: _Numbers  # in float32
    usual: _Numbers  # in the run's dtype

    @classmethod
    def begin(cls, policy: Policy, head: Head, path: str, share_prompt: bool, compiling: bool) -> KernelCheck:
        """Compare each kernel by itself, on what this model gives it, and measure the plain ones.

        Args:
            compiling: whether the policy's blocks will be compiled.

        Raises:
            ModelError: a kernel is wrong.
        """
        usual_policy = Policy.plain(policy.model, policy.dtype)
        batch = probe_pack(probes(policy), share_prompt, compiling).to(policy.device)
        with enough_memory("checking the kernels"):
            _check_attention(policy, batch, path)
            usual_policy.keep_activations("block")  # where memory is short, it is short here too
            usual = _through(usual_policy, batch)
            _check_head(usual_policy, head, batch, path)
            with in_float32(policy.model):
                exact_policy = Policy.plain(policy.model, torch.float32)
                exact_policy.keep_activations("block")
                exact = _through(exact_policy, batch)
            usual_policy.keep_activations("none")
        return cls(path, batch, exact, usual)

    def compare(self, policy: Policy) -> None:
        """Take the pack through the policy as it will train. Raises ModelError where its numbers are not the plain."""
        with enough_memory("checking the kernels"):
            found = _through(policy, self.batch)
        what = f"{self.path}: the {'compiled ' if policy.compiled else ''}blocks"
        _check(what, "hidden states", found.hidden, self.usual.hidden, self.exact.hidden)
        _check(what, "gradients", found.d_embedded, self.usual.d_embedded, self.exact.d_embedded)


def _check(what: str, quantity: str, found: Tensor, usual: Tensor, exact: Tensor, floor: float = 0.0) -> None:
    """Raises ModelError where one is further from the exact than rounding takes it; `floor` is added to what may be."""
    size, error, rounding = (float(t.double().norm()) for t in (exact, found - exact, usual - exact))
    if error <= _TIMES * rounding + _FLOOR * size + floor:  # not so for NaN
        return
    size = size or 1.0
    raise ModelError(
        f"{what}: {quantity} are {error / size:.1e} of their size away from those of plain kernels in float32; plain "
        f"kernels in the run's dtype are {rounding / size:.1e} away. So they are wrong on this device, with these "
        "versions of PyTorch, Triton and the driver, and nothing is trained. Set model.compile to off, if blocks are "
        "compiled; or use train.device cpu, or other versions."
    )


def _through(policy: Policy, batch: PackedBatch) -> _Numbers:
    with torch.enable_grad(), _embedded(policy) as embedded:
        hidden = policy.hidden_rows(batch)
        (gradient,) = torch.autograd.grad(hidden, embedded[0], _noise(hidden, seed=0))
    return _Numbers(hidden.detach().float().cpu(), gradient.float().cpu())


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


def _noise(like: Tensor, seed: int) -> Tensor:
    """Normal numbers of a tensor's shape, the same whenever asked, and from no generator that the run uses."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


# --- each kernel by itself --------------------------------------------------------------------------------------------


def _check_attention(policy: Policy, batch: PackedBatch, path: str) -> None:
    """Every call of attention in a forward pass, with its own queries, keys and values."""
    watched = Policy.plain(policy.model, policy.dtype)
    what = f"{path}: attention kernel {policy.kernels.names['attention']}"
    beside = _Beside(watched.kernels.attention, policy.kernels.attention, what)
    watched.kernels = replace(watched.kernels, attention=beside)  # type: ignore[arg-type]
    with torch.no_grad():
        watched.hidden_rows(batch)


class _Beside:
    """Plain attention that has another kind do the same, forward and backward, and compares."""

    def __init__(self, plain: Any, other: Any, what: str) -> None:
        self._kinds = plain, other
        self._what, self._calls = what, 0

    def prepare(self, layout: ForkLayout) -> _Beside:
        self._plain, self._other = (kind.prepare(layout) for kind in self._kinds)
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        self._calls += 1
        given = (query, key, value)
        exact, usual, found = (
            _attended(kind, [t.to(dtype) for t in given], how)
            for kind, dtype in ((self._plain, torch.float32), (self._plain, query.dtype), (self._other, query.dtype))
        )
        # A gradient that is 0 but for rounding, such as that of scores of a single key, has no size to go by.
        floor = _FLOOR * 1e-2 * max(float(t.double().norm()) for t in exact[1:])
        names = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
        for name, f, u, e in zip(names, found, usual, exact, strict=True):
            _check(f"{self._what}, call {self._calls}", name, f, u, e, floor)
        return usual[0].to(query.dtype)


def _attended(attention: Any, given: Sequence[Tensor], how: dict[str, Any]) -> list[Tensor]:
    """Its output, and the gradients of a fixed sum of it by query, key and value; float32."""
    leaves = [t.detach().requires_grad_() for t in given]
    # Autocast, under which the model runs, would take float32 for bfloat16 here.
    with torch.enable_grad(), torch.autocast(given[0].device.type, enabled=False):
        out = attention.attend(*leaves, **how)
        gradients = torch.autograd.grad(out, leaves, _noise(out, seed=1))
    return [t.detach().float() for t in (out, *gradients)]


def _check_head(policy: Policy, head: Head, batch: PackedBatch, path: str) -> None:
    """Log-probs and their gradient from the same hidden states: the logits, with their rounding, are the same."""
    with torch.no_grad():
        hidden = policy.hidden_rows(batch)
    what = f"{path}: row_logps kernel {head.kernels.names['row_logps']}"
    (exact, d_exact), (found, d_found) = (
        _scored(policy, replace(head, kernels=kernels), hidden, batch) for kernels in (policy.kernels, head.kernels)
    )
    _check(what, "log-probs", found, exact, exact)
    # Both are rounded to the dtype at the end; a difference before that may tip them to neighbouring numbers.
    tipped = torch.finfo(policy.dtype).eps * float(d_exact.norm())
    _check(what, "gradients", d_found, d_exact, d_exact, tipped)


def _scored(policy: Policy, head: Head, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probs of the answers, and the gradient of a sum of them by the hidden states, float64 and float32."""
    leaf = hidden.detach().requires_grad_()
    weight, bias = policy.head_weight.detach(), policy.head_bias
    factors = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64, device=hidden.device)
    with torch.enable_grad():
        _, logps = head.backward(
            leaf,
            weight,
            batch,
            lambda first, last, sums: (factors[first:last] * sums).sum(),
            None if bias is None else bias.detach(),
        )
    assert leaf.grad is not None
    return logps, leaf.grad.float()
