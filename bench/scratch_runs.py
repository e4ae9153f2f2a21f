"""Training steps of models from nothing, on documents of random ids: what bench.scratch's rows are measured with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench import nothing
from bench.output import device
from bench.step import ready
from bench.timing import free_memory
from tuningfork.data.packing.loader import PackLoader
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models.hf.initial import initial_model
from tuningfork.report.run.metrics import StepResult
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.order import order_of
from tuningfork.train.session import Session
from tuningfork.train.steps import training_steps

WARM_UP = 2  # steps that no rate counts: the first compiles, the second meets the optimizer's moments


@dataclass(frozen=True)
class Work:
    """A recipe's model, and a session that trains it on packs of up to `tokens` tokens, as many as a step has."""

    name: str
    model: PreTrainedModel
    session: Session
    train: TrainConfig
    limits: PackLimits

    @property
    def vocabulary(self) -> int:
        return self.session.policy.vocab_size

    def steps(self, length: int, steps: int, **changes: Any) -> Iterator[StepResult]:
        """Steps on documents of `length` tokens, each step as many tokens as the others."""
        documents = nothing.documents(max(1, self.limits.tokens // length), length, self.vocabulary)
        train = replace(self.train, max_steps=steps, **changes)
        optimizer = build_optimizer(self.model, train)
        loader = PackLoader(documents, order_of(documents, train), self.limits, self.session.pin_memory)
        return training_steps(loader, self.session, optimizer, None, train, 0)

    def gradients(self, length: int) -> list[Tensor]:
        """Those of one pack, as the backward pass leaves them."""
        documents = nothing.documents(max(1, self.limits.tokens // length), length, self.vocabulary)
        [pack] = PackLoader(documents, order_of(documents, self.train), self.limits).step(0)
        session, where = self.session, device()
        batch = StepBatch.of([pack], session.objective, None)
        loss = session.objective.of_chunks(batch.own.to(where), batch.totals.to(where))
        session.scorer.backward(pack, loss, linear=session.objective.linear)
        found = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return found


def begin(
    name: str,
    tokens: int,
    positions: int,
    *,
    activation_memory: str = "none",
    optimizer: str = "adamw",
    dtype: torch.dtype | None = None,
    model: PreTrainedModel | None = None,
) -> Work:
    """A recipe's model on this device, with its recipe's optimizer and a constant rate.

    Args:
        tokens: of a step, and of a pack.
        positions: that the model knows at least.
        dtype: to compute in, if not in what a run takes by itself.
        model: one that was made before.
    """
    torch._dynamo.reset()
    free_memory()
    settings = nothing.recipe(name)
    train = replace(
        settings.train,
        tokens_per_step=tokens,
        schedule="constant",
        warmup_steps=0,
        activation_memory=activation_memory,
        optimizer=optimizer,  # type: ignore[arg-type]
    )
    if model is None:
        model = made(name, positions)
    limits = PackLimits.plan(tokens, "none", compiled=device().type == "cuda")
    chunk = settings.objective.head_chunk_rows
    model.to(device())  # type: ignore[arg-type]
    session = ready(model.train(), settings.objective, train, chunk, limits, dtype=dtype)
    return Work(name, model, session, train, limits)


def made(name: str, positions: int = 0) -> PreTrainedModel:
    """A recipe's model on the CPU in float32, as `model.init` gives it."""
    return initial_model(nothing.config(name, positions=positions), nothing.recipe(name).model.init_seed)


def tokens_per_second(steps: Iterator[StepResult]) -> dict[str, float]:
    """Rate by the median step behind the first ones, and what compiled in those that count."""
    counted = [step for step in steps if step.step > WARM_UP]
    tokens = {step.tokens for step in counted}
    assert len(tokens) == 1, f"steps of {sorted(tokens)} tokens have no rate in common"
    seconds = median(step.seconds for step in counted)
    return {
        "tokens_s": round(tokens.pop() / seconds, 1),
        "step_s": round(seconds, 5),
        "late": sum(step.compilations for step in counted),
    }


def phases(name: str, tokens: int, length: int) -> dict[str, float]:
    """Seconds of each phase of a start without weights.

    device_s         the device's own start: its driver and libraries
    made_s           initial values, on the CPU in float32
    moved_s          to the device; kernels chosen
    first_forward_s  one pack scored for the first time; compiles the forward pass where blocks are compiled
    first_step_s     the first training step; compiles the rest
    compile_s        what both take beyond their second time
    later_step_s     a step behind those
    """
    begun = time.perf_counter()
    torch.ones(8, 8, device=device()).matmul(torch.ones(8, 8, device=device())).sum().item()
    device_s = time.perf_counter() - begun
    begun = time.perf_counter()
    model = made(name, length)
    made_s = time.perf_counter() - begun
    begun = time.perf_counter()
    work = begin(name, tokens, length, model=model)
    moved_s = time.perf_counter() - begun
    documents = nothing.documents(max(1, tokens // length), length, work.vocabulary)
    [pack] = PackLoader(documents, order_of(documents, work.train), work.limits).step(0)
    forwards = []
    for _ in range(2):
        begun = time.perf_counter()
        work.session.scorer.score(pack).cpu()
        forwards.append(time.perf_counter() - begun)
    first, *later = (step.seconds for step in work.steps(length, WARM_UP + 3))
    steady = median(later[1:])
    found = {
        "device_s": device_s,
        "made_s": made_s,
        "moved_s": moved_s,
        "first_forward_s": forwards[0],
        "first_step_s": first,
        "compile_s": max(0.0, forwards[0] - forwards[1]) + max(0.0, first - steady),
        "later_step_s": steady,
    }
    return {phase: round(seconds, 3) for phase, seconds in found.items()}


def activations(name: str, tokens: int, length: int, steps: int, modes: list[str]) -> list[dict[str, Any]]:
    """A line for each way to keep activations.

    activation_gib   peak of a step - weights, their gradients and the optimizer's moments; None on a CPU
    of_none          that / that of `none`
    speed            tokens/s / those of `none`
    equal_gradients  whether all gradients of a pack are those of `none`, to the bit
    """
    lines: list[dict[str, Any]] = []
    truth: list[Tensor] = []
    for mode in modes:
        work = begin(name, tokens, length, activation_memory=mode)
        gradients = work.gradients(length)
        truth = truth or gradients
        equal = all(torch.equal(one, other) for one, other in zip(gradients, truth, strict=True))
        del gradients
        measured = list(work.steps(length, steps))
        held = 16 * sum(weight.numel() for weight in work.model.parameters())  # weights, gradients, moments: float32
        peaks = [step.peak_memory_bytes - held for step in measured[WARM_UP:] if step.peak_memory_bytes is not None]
        rate = tokens_per_second(iter(measured))["tokens_s"]
        lines.append({"mode": mode, "tokens_s": rate, "activation_gib": max(peaks) / 2**30 if peaks else None})
        first = lines[0]
        lines[-1] |= {
            "of_none": lines[-1]["activation_gib"] / first["activation_gib"] if peaks else None,
            "speed": round(rate / first["tokens_s"], 3),
            "equal_gradients": equal,
        }
        del work
    return lines


def state_bytes(work: Work, length: int, steps: int) -> dict[str, float]:
    """Bytes of moments that a weight has behind `steps` steps, and the mean loss of the last tenth of them."""
    documents = nothing.documents(max(1, work.limits.tokens // length), length, work.vocabulary)
    train = replace(work.train, max_steps=steps)
    optimizer = build_optimizer(work.model, train)
    loader = PackLoader(documents, order_of(documents, train), work.limits, work.session.pin_memory)
    losses = [step.loss for step in training_steps(loader, work.session, optimizer, None, train, 0)]
    moments = sum(_bytes(value) for state in optimizer.state.values() for value in state.values())
    last = losses[-max(1, steps // 10) :]
    return {"bytes_a_weight": moments / sum(p.numel() for p in work.model.parameters()), "loss": sum(last) / len(last)}


def _bytes(value: Any) -> int:
    """Of a moment: of one in 8 bits, those of the tensors that it consists of."""
    if not isinstance(value, Tensor) or not value.ndim:
        return 0
    if hasattr(value, "__tensor_flatten__"):  # private: torch.Tensor.__tensor_flatten__
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size()
