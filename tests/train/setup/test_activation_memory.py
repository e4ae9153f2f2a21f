"""`auto`: the fastest mode that fits, from measured numbers; and the dry run that measures them."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch

from tests.tiny import limits_of, scorer_of, tiny_policy
from tuningfork.errors import ConfigError
from tuningfork.models.activations import budget_of
from tuningfork.models.policy import Policy
from tuningfork.report.run.console import Console
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer, optimizer_bytes
from tuningfork.train.setup import activation_memory
from tuningfork.train.setup.activation_memory import (
    Choice,
    DryRun,
    check_least,
    choose_activation_memory,
    fastest_that_fits,
)

ROWS = 1000


class Card:
    """A GPU of `size` bytes: 100 for weights, gradients and head; a row takes 1.0 by `none`, 0.2 by `block`, 0.1 by
    `offload`, and by a budget what lies between, `bulge` more."""

    def __init__(self, size: float, bulge: float = 0.0) -> None:
        self.size, self.bulge = size, bulge
        self.asked: list[tuple[str, int]] = []

    def peak(self, mode: str, rows: int) -> int | None:
        self.asked.append((mode, rows))
        budget = budget_of(mode)
        a_row = {"none": 1.0, "block": 0.2, "offload": 0.1}.get(mode, 0.2 + 0.8 * (budget or 0) + self.bulge)
        taken = round(100 + rows * a_row)
        return taken if taken <= self.size else None

    def choose(self, room: float | None = None, compiled: bool = True) -> Choice:
        return fastest_that_fits(self.peak, ROWS, 128, int(room or self.size), compiled)


@pytest.mark.parametrize(
    ("size", "mode"),
    [(1200, "none"), (1100, "none"), (1099, "budget:0.8"), (940, "budget:0.8"), (939, "budget:0.6"),
     (700, "budget:0.4"), (500, "budget:0.2"), (400, "block"), (300, "block"), (299, "offload"), (200, "offload"),
     (199, None)],
)  # fmt: skip
def test_the_fastest_mode_that_fits(size, mode):
    choice = Card(size).choose()
    assert choice.mode == mode
    if mode is not None:
        assert choice.peaks[mode] is not None and choice.peaks[mode] <= size


def test_what_fits_at_once_is_tried_once():
    card = Card(1100)
    card.choose()
    assert card.asked == [("none", ROWS)]


def test_a_peak_that_the_card_bears_but_the_run_does_not_is_known_exactly():
    card = Card(2000)
    assert card.choose(room=800).mode == "budget:0.6"
    assert card.asked == [("none", ROWS), ("block", ROWS), ("budget:0.6", ROWS)]


def test_a_peak_that_the_card_does_not_bear_is_estimated_from_smaller_packs():
    card = Card(500)
    assert card.choose().mode == "budget:0.2"
    assert card.asked == [
        *(("none", ROWS), ("block", ROWS), ("none", 500), ("block", 500), ("none", 250), ("block", 250)),
        ("budget:0.2", ROWS),
    ]


def test_a_budget_that_takes_more_than_expected_gives_way_to_the_next():
    assert Card(800, bulge=0.1).choose().mode == "budget:0.4"
    assert Card(400, bulge=0.1).choose().mode == "block"


def test_without_a_compiler_there_are_no_budgets():
    card = Card(800)
    assert card.choose(compiled=False).mode == "block"
    assert card.asked == [("none", ROWS), ("block", ROWS)]


def test_packs_too_small_to_say_anything_leave_block():
    card = Card(310)
    card.peak = lambda mode, rows: None if mode == "none" else 300  # type: ignore[method-assign]
    assert card.choose().mode == "block"


def test_a_dry_run_runs_a_full_pack_and_leaves_no_trace():
    policy = tiny_policy("llama", torch.float32)
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    limits, state = limits_of(1024), torch.get_rng_state()
    there, rows = [], []

    def meter(run):
        there.append(all((p.grad == 0).all() for p in policy.model.parameters()))
        handle = policy.model.base_model.embed_tokens.register_forward_hook(lambda m, i, out: rows.append(out.shape[1]))
        run()
        handle.remove()
        there.append(all(p.grad.any() for p in policy.model.parameters()))
        return {"none": 7, "block": 5}[policy.activation_memory]

    dry = DryRun(scorer_of(policy), limits, meter)
    assert (dry.peak("none", 1024), dry.peak("block", 500)) == (7, 5)
    assert there == [True] * 4 and rows == [1024, 512]
    assert all(p.grad is None for p in policy.model.parameters())
    assert all(torch.equal(p, weights[name]) for name, p in policy.model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dry_run_without_enough_memory_says_so_and_cleans_up():
    policy = tiny_policy("llama", torch.float32)

    def meter(run):
        run()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.06 GiB.")

    assert DryRun(scorer_of(policy), limits_of(1024), meter).peak("none", 1024) is None
    assert all(p.grad is None for p in policy.model.parameters())

    def broken(run):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        DryRun(scorer_of(policy), limits_of(1024), broken).peak("none", 1024)


@pytest.mark.parametrize("share", ["prompt", "none"])
@pytest.mark.parametrize("rows", [64, 100, 640, 1000, 8192])
def test_a_dry_runs_pack_is_nearly_full_of_answers(rows, share):
    policy = tiny_policy("llama", torch.float32)
    pack = DryRun(scorer_of(policy), limits_of(8192, share), lambda run: 0)._pack(rows)
    assert rows <= len(pack.input_ids) < rows + 64
    assert len(pack.logit_rows) >= 0.7 * rows
    assert np.diff(pack.layout.position_of_row.numpy()).max() == 1
    assert int(pack.input_ids.min()) >= 0 and int(pack.input_ids.max()) < policy.config.vocab_size


@pytest.mark.parametrize("share", ["prompt", "none"])
@pytest.mark.parametrize("positions", [8, 20, 100])
def test_a_dry_runs_sequences_stay_within_the_models_positions(positions, share):
    policy = tiny_policy("llama", torch.float32)
    policy.config.max_position_embeddings = positions
    for rows in (64, 1000, 8192):
        pack = DryRun(scorer_of(policy), limits_of(8192, share), lambda run: 0)._pack(rows)
        assert int(pack.layout.position_of_row.max()) < positions
        assert len(pack.logit_rows) >= 0.5 * rows


def test_on_a_cpu_auto_is_none():
    policy, out = tiny_policy("llama", torch.float32), io.StringIO()
    policy.keep_activations("block")
    choose_activation_memory(scorer_of(policy), limits_of(), lambda model: 0, Console(out))
    assert policy.activation_memory == "none"
    assert "auto is none on a CPU" in out.getvalue()


@pytest.mark.parametrize(
    ("room", "mode", "words"),
    [(30, "none", "none, the fastest"), (24, "block", "GiB needed: none 0.0, block 0.0"), (10, None, "")],
)
def test_the_mode_that_fits_beside_the_optimizer_is_kept(monkeypatch, room, mode, words):
    """As on a GPU, but for the bytes: 20 with all kept, 15 with blocks recomputed, 5 more for the optimizer."""
    policy, out = tiny_policy("llama", torch.float32), io.StringIO()
    taken = {"none": 20, "block": 15, "offload": 12}

    class OnAGpu(Policy):
        device = torch.device("cuda")

    gpu = copy.copy(policy)
    gpu.__class__ = OnAGpu
    monkeypatch.setattr(
        activation_memory.DryRun,
        "peak",
        lambda self, mode, rows: self.scorer.policy.keep_activations(mode) or taken[mode],
    )
    monkeypatch.setattr(activation_memory, "_usable", lambda device: room)
    if mode is None:
        with pytest.raises(ConfigError, match=r"no mode fits a pack of pack\.tokens 512"):
            choose_activation_memory(scorer_of(gpu), limits_of(512), lambda model: 5, Console(out))
        return
    choose_activation_memory(scorer_of(gpu), limits_of(512), lambda model: 5, Console(out))
    assert gpu.activation_memory == mode and words in out.getvalue()


def moments(config: TrainConfig) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """A model, one matrix of it large enough for 8 bits, and what its optimizer holds after a step."""
    model = torch.nn.ModuleList([torch.nn.Linear(64, 128), torch.nn.Linear(8, 8)])
    optimizer = build_optimizer(model, config)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return model, [t for state in optimizer.state.values() for t in state.values() if t.ndim]


def test_the_optimizers_memory_is_known_before_there_is_one():
    for config in (TrainConfig(), TrainConfig(ema_decay=0.9)):
        model, held = moments(config)
        assert sum(t.nbytes for t in held) == optimizer_bytes(model, config)


def test_8_bit_moments_take_a_byte_and_a_scale_for_each_block(uncompiled):
    config = TrainConfig(optimizer="adamw_8bit")
    model, held = moments(config)
    taken = [t.codes.nbytes + t.scale.nbytes if hasattr(t, "codes") else t.nbytes for t in held]
    assert sum(taken) == optimizer_bytes(model, config)
    assert sum(taken) < sum(8 * weight.numel() for weight in model.parameters()) / 3


def test_gib():
    assert tuple(map(activation_memory._gib, (None, 2**30, 2**30), (0, 0, 2**29))) == (
        "more than there is",
        "1.0",
        "1.5",
    )


@pytest.mark.parametrize("mode", ["none", "block", "offload"])
def test_what_cannot_fit_is_refused_with_its_sum(mode):
    """Weights, optimizer, and the larger of gradients and of what a pack keeps between blocks; which may be no byte
    less, and is not counted where it goes to the host."""
    policy = tiny_policy()
    states = optimizer_bytes(policy.model, TrainConfig())
    weights = sum(weight.nbytes for weight in policy.model.parameters())
    limits = limits_of(1 << 20, "tree")
    rows = limits.slots(limits.tokens)
    inputs = rows * len(policy.blocks) * policy.config.hidden_size * policy.dtype.itemsize
    assert inputs > weights and states == 2 * weights
    least = 3 * weights + (weights if mode == "offload" else inputs)
    check_least(policy, limits, mode, states, usable=least)
    with pytest.raises(ConfigError, match=f"train.activation_memory is {mode}, and this run needs") as caught:
        check_least(policy, limits, mode, states, usable=least - 1)
    assert f"({rows:,} rows of pack.tokens {limits.tokens:,} x {len(policy.blocks)} blocks x" in str(caught.value)
    check_least(policy, limits, mode, states)  # a CPU is not asked
