"""`train.activation_memory: auto`: the fastest mode with which a full pack fits the GPU, found by trying.

A dry run takes one pack forward and backward, head included, with all gradients in place. What a run allocates beyond
that is the optimizer's state, which is known without trying.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tuningfork.data.packing.layout import build_pack
from tuningfork.data.packing.pack import PackLimits
from tuningfork.errors import ConfigError, OutOfMemory, enough_memory
from tuningfork.models.hf.support import positions
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.records import PackedBatch, Source, TokenAnswer, TokenExample
from tuningfork.report.run.console import Console

BUDGETS = (0.8, 0.6, 0.4, 0.2)
USABLE = 0.94  # of what others leave of the GPU: memory comes in pieces, and some lie idle between others

Peak = Callable[[str, int], int | None]
"""(mode, rows of the pack) -> bytes at the peak of a dry run; None where there were not enough."""


@dataclass
class Choice:
    """The mode that was chosen, and what was tried. `peaks`: mode -> bytes that a full pack took, None if too many."""

    mode: str | None = None  # None: nothing fits
    peaks: dict[str, int | None] = field(default_factory=dict)


def fastest_that_fits(peak: Peak, rows: int, smallest: int, room: int, budgets: bool) -> Choice:
    """The fastest mode whose peak with a pack of `rows` rows is at most `room` bytes.

    `none` comes first. Where it does not fit, `block` bounds the memory of every budget from below and tells the budget
    to begin with: memory lies about linearly between the two. A budget is taken only after a dry run of its own.

    Args:
        peak: does a dry run. Asked for full packs, and to find what `none` would take, for smaller ones.
        smallest: rows below which a pack says nothing.
        budgets: whether they are possible.
    """
    choice = Choice()

    def fits(mode: str) -> bool:
        choice.peaks[mode] = taken = peak(mode, rows)
        if taken is None or taken > room:
            return False
        choice.mode = mode
        return True

    if fits("none"):
        return choice
    if not fits("block"):
        fits("offload")
        return choice
    if budgets:
        least = choice.peaks["block"] or 0
        most = choice.peaks["none"] or _extrapolated(peak, least, rows, smallest)
        for budget in BUDGETS:
            expected = None if most is None else least + budget * (most - least)
            if expected is not None and expected <= room and fits(f"budget:{budget}"):
                break
    return choice


def _extrapolated(peak: Peak, block: int, rows: int, smallest: int) -> float | None:
    """What `none` would take with a full pack, from the largest smaller one that it can take.

    Only what it takes beyond `block` is scaled up: that is the blocks' activations, which grow with the rows. The rest
    does not, neither the weights nor the head, whose chunks have their own size.
    """
    part = rows // 2
    while part >= smallest:
        some, some_block = peak("none", part), peak("block", part)
        if some is not None and some_block is not None:
            return block + (some - some_block) * rows / part
        part //= 2
    return None


@dataclass
class DryRun:
    """Packs of random tokens through a scorer, forward and backward. Weights and random state stay as they are.

    Args:
        meter: runs a function and returns the bytes at its peak.
    """

    scorer: Scorer
    limits: PackLimits
    meter: Callable[[Callable[[], None]], int]

    def peak(self, mode: str, rows: int) -> int | None:
        """Bytes at the peak of a pack of about `rows` rows in a mode, gradients included; None: there were not enough.

        The policy keeps that mode. Gradients are there before, as they are from the second pack of a step on.
        """
        policy = self.scorer.policy
        policy.keep_activations(mode)
        taken = None
        with suppress(OutOfMemory), enough_memory("dry run"):
            pack = self._pack(rows).to(policy.device)
            for weight in policy.model.parameters():
                weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype) if weight.requires_grad else None
            taken = self.meter(lambda: self._backward(pack))
        if policy.spread is not None:
            policy.spread.release()
        policy.model.zero_grad(set_to_none=True)
        if policy.device.type == "cuda":
            gc.collect()  # an error that was caught may still hold what it failed over
            torch.cuda.empty_cache()
        return taken

    def _backward(self, pack: PackedBatch) -> None:
        def loss(first: int, last: int, logps: Tensor) -> Tensor:
            return -logps.sum()

        self.scorer.backward(pack, loss)

    def _pack(self, rows: int) -> PackedBatch:
        rows = self.limits.slots(rows)
        config = self.scorer.policy.config
        longest = positions(config) or rows
        return build_pack(list(_pairs(rows, config.vocab_size, longest)), rows, self.limits.share)


def _pairs(rows: int, vocabulary: int, positions: int) -> Iterator[TokenExample]:
    """Random pairs that fill a pack: short prompts and long answers, since a row of an answer costs the head most.

    A pair takes up to 512 rows, and each of its two sequences half of them at most, but no more than `positions`.
    """
    draw = np.random.default_rng(0).integers
    count = -(-rows // (16 * max(1, min(32, positions // 8))))
    unit = rows // (16 * count)  # a pair takes 16 of them if the prompt is repeated, 15 if not

    def ids(count: int) -> np.ndarray:
        return draw(vocabulary, size=count).astype(np.int32)

    for row in range(1, count + 1):
        answers = tuple(TokenAnswer(ids(7 * unit), np.ones(7 * unit, dtype=bool)) for _ in range(2))
        yield TokenExample(Source("dry run", row), ids(unit), answers)


def choose_activation_memory(
    scorer: Scorer,
    limits: PackLimits,
    optimizer_bytes: Callable[[torch.nn.Module], int],
    console: Console,
    budgets: bool = True,
) -> None:
    """Let the policy keep its activations by the fastest mode that fits its GPU, and say which; on a CPU, by `none`.

    Args:
        optimizer_bytes: what the optimizer will hold for a model.
        budgets: whether compiled blocks can have one.

    Raises:
        ConfigError: a full pack fits by no mode.
    """
    policy = scorer.policy
    if policy.device.type != "cuda":
        policy.keep_activations("none")
        console.print("activation memory: auto is none on a CPU, which has no memory of its own to fit")
        return
    console.print("activation memory: auto, trying full packs by one mode after the other, the fastest first")
    usable, states = _usable(policy.device), optimizer_bytes(policy.model)
    dry = DryRun(scorer, limits, _cuda_peak)
    budgets = budgets and policy.compiled
    choice = fastest_that_fits(dry.peak, limits.slots(limits.tokens), limits.smallest, usable - states, budgets)
    tried = ", ".join(f"{mode} {_gib(taken, states)}" for mode, taken in choice.peaks.items())
    if choice.mode is None:
        raise ConfigError(
            f"train.activation_memory is auto, but no mode fits a pack of pack.tokens {limits.tokens:,} into the "
            f"{_gib(usable)} GiB that can be used of this GPU. GiB needed: {tried}; {_gib(states)} of them are the "
            "optimizer's. Lower pack.tokens, or objective.head_chunk_rows."
        )
    policy.keep_activations(choice.mode)
    console.print(
        f"activation memory: {choice.mode}, the fastest that fits a pack of {limits.tokens:,} tokens into "
        f"{_gib(usable)} GiB; GiB needed: {tried}"
    )


def check_least(policy: Policy, limits: PackLimits, mode: str, states: int, usable: int | None = None) -> None:
    """Refuse a mode whose run cannot fit its GPU, by arithmetic alone: what a dry run would find, and an error in the
    first steps would say without the reason. What passes may still be too much.

    Counted are weights and optimizer, and beside them either gradients or, before these are there, the input that each
    block keeps of every row of a full pack: all that `block` keeps between blocks, and less than any other mode on the
    GPU but `offload`.

    Args:
        states: bytes that the optimizer will hold for the whole model.
        usable: bytes of the GPU that a run may use; asked of the GPU if None, and not at all on a CPU.

    Raises:
        ConfigError: with the parts of the sum.
    """
    if usable is None:
        if policy.device.type != "cuda":
            return
        usable = _usable(policy.device)
    whole = list(policy.model.parameters())
    here = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in whole]  # where it is spread
    weights = sum(weight.numel() * weight.element_size() for weight in here)
    gradients = sum(
        part.numel() * (weight.grad_dtype or weight.dtype).itemsize
        for weight, part in zip(whole, here, strict=True)
        if weight.requires_grad
    )
    states = states * sum(part.numel() for part in here) // sum(weight.numel() for weight in whole)
    rows, blocks, width = limits.slots(limits.tokens), len(policy.blocks), policy.config.hidden_size
    inputs = 0 if mode == "offload" else rows * blocks * width * policy.dtype.itemsize
    least = weights + states + max(gradients, inputs)
    if least <= usable:
        return
    raise ConfigError(
        f"train.activation_memory is {mode}, and this run needs more than {_gib(least)} GiB, where {_gib(usable)} "
        f"can be used of this GPU: weights {_gib(weights)}, optimizer {_gib(states)}, and gradients {_gib(gradients)} "
        f"or, if more, what a pack keeps between blocks, {_gib(inputs)} ({rows:,} rows of pack.tokens "
        f"{limits.tokens:,} x {blocks} blocks x {width:,} numbers).",
        "Where the pack is too large, lower pack.tokens and data.max_length, or set train.activation_memory: offload. "
        "A single example is not spread over GPUs. Where the weights are, set train.optimizer: adamw_8bit and "
        "model.weights: bfloat16, or spread them over more GPUs by parallel.shard.",
    )


def _cuda_peak(run: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _usable(device: torch.device) -> int:
    """Bytes of the GPU that a run may use: a share of all that nobody else holds."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(USABLE * (total - others))


def _gib(taken: int | None, more: int = 0) -> str:
    return "more than there is" if taken is None else f"{(taken + more) / 2**30:.1f}"
