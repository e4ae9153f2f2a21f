"""At every start: does the head give the log-probs and gradients that PyTorch's own log-softmax gives, on this device?

The starting model and the reference go through the same head, so what is wrong in it cancels at step 0 and never again.
It is therefore held against other code than its own: a product, `log_softmax` and autograd, in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.errors import LOADING, ModelError, enough_memory
from tuningfork.models.head import Head
from tuningfork.models.policy import Policy, picked
from tuningfork.models.scorer import Scorer
from tuningfork.records import PackedBatch, TokenAnswer
from tuningfork.train.checks.self_check import probes

NOTHING_IS_TRAINED = (
    "So they are wrong on this device, with these versions of PyTorch, Triton and the driver, and nothing is trained."
)
# Of what is compared, in float32: a hundred roundings of sums over a few thousand numbers.
_FLOOR = 1e-4


def check_head(scorer: Scorer, path: str) -> None:
    """Score a small pack with the head and without it, from the same hidden states. Nothing is left in any `.grad`.

    Raises:
        ModelError: the head's log-probs or gradients are wrong on this device.
    """
    policy, head = scorer.policy, scorer.head
    batch = _pack(policy).to(policy.device)
    with enough_memory("checking the head", LOADING):
        with torch.no_grad():
            hidden = policy.hidden_rows(batch)
        given = [t.detach() for t in (hidden, policy.head_weight, policy.head_bias) if t is not None]
        factors = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64, device=hidden.device)
        found, d_found = _by_the_head(head, given, batch, factors)
        exact, d_exact = _by_autograd(policy, given, batch, factors)
        what = f"{path}: the head, with row_logps kernel {head.kernels.names['row_logps']}"
        # A log-prob is mostly that of chance, which a wrong logit does not change; a sum of float32 is as exact as all
        # of it allows.
        lengths = torch.tensor(batch.answer_lengths, dtype=torch.float64, device=hidden.device)
        beyond_chance = exact + lengths * torch.tensor(float(policy.config.vocab_size)).log()
        rounding = 8 * torch.finfo(torch.float32).eps * float(exact.norm())
        _check(what, "log-probs", found - exact, _FLOOR * float(beyond_chance.norm()) + rounding, float(exact.norm()))
        # The gradient of logits is rounded to the factors' dtype, and the other gradients once more, to their own.
        factor = torch.finfo(hidden.dtype if hidden.is_cuda else torch.float32).eps
        for of, e, f in zip(("hidden states", "the weight", "the bias"), d_exact, d_found, strict=False):
            size, own = float(e.norm()), torch.finfo(f.dtype).eps
            _check(what, f"gradients of {of}", f.float() - e, (_FLOOR + factor + own) * size, size)
        _check_picked(batch, hidden, path)


def _pack(policy: Policy) -> PackedBatch:
    """The probes, the first of them twice: with the same first answer, whose logit rows the two then share."""
    first, *others = probes(policy)
    answer = first.answers[0]
    again = replace(first, answers=(answer, TokenAnswer(answer.ids[::-1].copy(), answer.mask)))
    examples = [first, again, *others]
    forest = grow(examples, "tree").of(range(len(examples)))
    return lay(examples, forest, forest.rows)


def _by_the_head(head: Head, given: list[Tensor], batch: PackedBatch, factors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Answer log-probs [A], float64, and the gradients of their sum with these factors by what is given."""
    leaf, weight, *bias = leaves = [t.clone().requires_grad_() for t in given]
    with torch.enable_grad():
        share = lambda first, last, sums: (factors[first:last] * sums).sum()  # noqa: E731
        _, logps = head.backward(leaf, weight, batch, share, bias[0] if bias else None)
    return logps, [t.grad for t in leaves if t.grad is not None]


def _by_autograd(
    policy: Policy, given: list[Tensor], batch: PackedBatch, factors: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Answer log-probs and gradients by PyTorch alone, in float32 from the hidden states and the weight used."""
    hidden, weight, *bias = given
    weight = weight.to(hidden.dtype) if hidden.is_cuda else weight
    leaf, weight, *bias = leaves = [t.float().detach().requires_grad_() for t in (hidden, weight, *bias)]
    transform = policy.transform
    with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
        logits = transform.scale * torch.nn.functional.linear(leaf, weight, *bias)
        if transform.softcap is not None:
            logits = transform.softcap * torch.tanh(logits / transform.softcap)
        rows = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0].double()
        owners = torch.nn.functional.one_hot(batch.answer_of_counted, len(factors)).double()
        logps = owners.t() @ rows[batch.logit_row_of_counted]
        gradients = torch.autograd.grad((factors * logps).sum(), leaves)
    return logps.detach(), list(gradients)


def _check_picked(batch: PackedBatch, hidden: Tensor, path: str) -> None:
    """The rows that the head works on, and what their gradients bring back to the rows that they were picked from."""
    rows, noise = batch.logit_rows, torch.Generator().manual_seed(3)
    owners = torch.nn.functional.one_hot(rows, len(batch.input_ids)).double()
    whole = torch.randn(len(batch.input_ids), 8, generator=noise).to(hidden.device, hidden.dtype).requires_grad_()
    back = torch.randn(len(rows), 8, generator=noise).to(hidden.device, hidden.dtype)
    with torch.enable_grad():
        found = picked(whole, rows)
        (d_found,) = torch.autograd.grad(found, whole, back)
    d_exact = owners.t() @ back.double()
    what = f"{path}: rows picked for the head"
    _check(what, "values", found.detach().double() - owners @ whole.detach().double(), 0.0, 1.0)
    bound = torch.finfo(hidden.dtype).eps * float(d_exact.norm())
    _check(what, "gradients", d_found.double() - d_exact, bound, float(d_exact.norm()))


def _check(what: str, quantity: str, error: Tensor, bound: float, size: float) -> None:
    off = float(error.double().norm())
    if off <= bound:  # not so for NaN
        return
    raise ModelError(
        f"{what}: {quantity} are {off / (size or 1.0):.1e} of their size away from PyTorch's own, and rounding takes "
        f"them {bound / (size or 1.0):.1e} at most. {NOTHING_IS_TRAINED} Use train.device cpu, or other versions."
    )
