"""From a model folder to a session: loaded, checked on this device, kernels and compiler under it."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tuningfork.data.packing.pack import PackLimits
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.load import load_split, load_spread
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import ConfigError
from tuningfork.models import activations
from tuningfork.models.hf import export
from tuningfork.models.hf.load import Loaded, load
from tuningfork.models.policy import Policy, Spread
from tuningfork.models.scorer import Scorer
from tuningfork.models.split_k import choose_library
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Console
from tuningfork.train import checkpoint
from tuningfork.train.checks.head_check import check_head
from tuningfork.train.checks.kernel_check import KernelCheck
from tuningfork.train.checks.self_check import check_packed_equals_alone, untried
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import hold_gradients, optimizer_bytes
from tuningfork.train.session import Session
from tuningfork.train.setup.activation_memory import check_least, choose_activation_memory
from tuningfork.train.setup.device import (
    DTYPES,
    check_tf32,
    choose_compile,
    choose_dtype,
    device_name,
    dtype_name,
    real_float32,
    set_tf32,
)


def start_model(config: RunConfig, device: torch.device, console: Console, ranks: Ranks = ONE_PROCESS) -> Session:
    """Load the starting model, check that packing it is exact, put kernels and compiler under it, and check these.

    It keeps activations as `train.activation_memory` says; where that is auto, as little of them as scoring allows,
    until `choose_activations`.

    Raises:
        ConfigError: something that the settings ask for cannot be had here.
        ModelError: the model cannot be loaded, packing it is not exact, or its kernels are wrong on this device.
    """
    model = config.model
    train = config.train
    dtype = choose_dtype(model, device)
    compiled = choose_compile(model.compile, device)
    # What cannot be had is said now, before minutes of reading and scoring.
    check_tf32(model, device)
    set_tf32(False)  # for the checks, whatever a run before in this process had
    activations.check_mode(train.activation_memory, compiled)
    choose_library(device, dtype, exact=config.objective.build().needs_reference)
    layout = Layout.plan(config.parallel, ranks)
    if layout.tensor > 1 and activations.budget_of(train.activation_memory) is not None:
        raise ConfigError(
            f"train.activation_memory is {train.activation_memory}, and parallel.tensor {layout.tensor}: the compiler "
            "takes no budget of blocks that several processes compute together. Set the one to none, block or auto, or "
            "the other to 1."
        )
    with console.stage("device", f"setting up {device_name(device)}"):
        torch.zeros(1, device=device)  # the first use of a GPU sets it up, which is no part of what follows
    held = DTYPES[model.weights]
    # Spread weights are checked in float32, and read anew if they are to be held otherwise: FSDP does not cast them. So
    # are those that several processes compute with together: that is checked against the model unsplit, which is spread
    # over these meanwhile, and in none of them whole.
    first = torch.float32 if layout.size > 1 else held
    loaded, spread = _load(config, device, first, dtype, layout.unsplit, console)
    _say_how_read(loaded, model.path, console)
    policy, check = _checked(config, loaded, spread, dtype, compiled, console, split=layout.tensor > 1)
    if spread is not None and (held != torch.float32 or layout.tensor > 1):
        del policy, loaded, spread
        gc.collect()
        loaded, policy = _load_anew(config, device, held, dtype, layout, console)
        hold_gradients(loaded.model, train)
    scorer = Scorer.of(policy, config.objective.head_chunk_rows)
    console.print(
        f"{model.path}: {sum(p.numel() for p in loaded.model.parameters()):,} parameters on {device_name(device)}, "
        f"kept in {model.weights}, computing in {dtype_name(dtype)}{', products in TF32' if model.tf32 else ''}, "
        + ", ".join(f"{kind} kernel {name}" for kind, name in policy.kernels.names.items())
        + (", blocks compiled" if compiled else "")
    )
    if model.weights == "bfloat16" and train.gradient_dtype == "weights":
        console.print(
            "gradients are added up in bfloat16 where their weights are, so how a batch is cut into packs changes the "
            "rounding of a step; train.gradient_dtype: float32 costs 2 more bytes a weight and does not round"
        )
    if ranks.size > 1:
        console.print(f"{ranks.size} processes: {layout}; gradients are added up in {config.parallel.reduce_dtype}")
    parallelize(
        policy,
        "block" if train.activation_memory == "auto" else train.activation_memory,
        compiled,
        layout,
        DTYPES[config.parallel.reduce_dtype],
        reshard_after_forward=config.parallel.reshard_after_forward,
    )
    if layout.shard > 1 and device.type == "cuda":
        _note_room(loaded, train, device, console)
    if check is not None:
        with console.stage("kernel check", "compiling and checking kernels and blocks"):
            check.compare(policy)
    for words in untried(policy):
        console.print(f"checks at the start: {words}")
    set_tf32(model.tf32)  # all has been checked
    return Session(scorer, config.objective.build(), loaded, check, ranks, layout)


def _note_room(loaded: Loaded, train: TrainConfig, device: torch.device, console: Console) -> None:
    """Say so where weights are spread that need not be."""
    weights = [(p.numel(), p.element_size() + (p.grad_dtype or p.dtype).itemsize) for p in loaded.model.parameters()]
    needed = sum(count * size for count, size in weights) + optimizer_bytes(loaded.model, train)
    room = torch.cuda.get_device_properties(device).total_memory
    if needed <= room / 3:
        console.print(
            f"weights, gradients and moments take {needed / 1e9:.0f} of the {room / 1e9:.0f} GB that each GPU has: "
            "with parallel.shard: 1 nothing would be gathered, which is faster"
        )


def choose_activations(
    session: Session, train: TrainConfig, limits: PackLimits, last: Path | None, console: Console
) -> None:
    """Carry out `train.activation_memory: auto` before anything is scored: the fastest mode that fits. Another mode is
    held against the GPU's memory, as far as that takes no trying.

    A run that goes on from its checkpoint `last` keeps the mode that it began with, whatever else is on the GPU now:
    gradients are rounded differently in another.

    Raises:
        ConfigError: no mode fits, or the one that is asked for cannot.
        ModelError: the blocks, compiled anew for that mode, are wrong on this device.
    """
    if train.activation_memory != "auto":
        states = optimizer_bytes(session.policy.model, train)
        check_least(session.policy, limits, train.activation_memory, states)
        return
    if last is not None:
        mode = checkpoint.progress(last).activation_memory
        session.policy.keep_activations(mode)
        console.print(f"activation memory: {mode}, as chosen when the run began")
    else:
        with console.startup.time("activation memory"):
            of_optimizer = partial(optimizer_bytes, config=train)
            choose_activation_memory(session.scorer, limits, of_optimizer, console, budgets=session.layout.tensor == 1)
    if session.check is not None and session.policy.activation_memory != "block":  # which `start_model` has compared
        with console.stage("kernel check", "compiling and checking kernels and blocks"), real_float32():
            session.check.compare(session.policy)


def _checked(
    config: RunConfig,
    loaded: Loaded,
    spread: Spread | None,
    dtype: torch.dtype,
    compiled: bool,
    console: Console,
    split: bool,
) -> tuple[Policy, KernelCheck | None]:
    """A policy whose packing and head have been checked, and what its kernels and blocks are to be checked against, if
    they are not plain, or will be `split` over several processes."""
    path = config.model.path
    with console.stage("self-check", "checking that packed examples equal the same ones alone"):
        check_packed_equals_alone(loaded.model, path, spread)
        export.check_exportable(loaded, path)
    hold_gradients(loaded.model, config.train)
    policy = Policy.fast(loaded.model, dtype, spread)
    if compiled:
        _check_compilable(policy, path)
    with console.stage("head check", "checking the head"):
        check_head(Scorer.of(policy, config.objective.head_chunk_rows), path)
    if not compiled and not split and policy.has_plain_kernels:
        return policy, None
    with console.stage("kernel check", "computing what kernels and compiled blocks are checked against"):
        return policy, KernelCheck.begin(policy, path, config.pack.share, compiled)


def _check_compilable(policy: Policy, path: str) -> None:
    """Raises ConfigError where compiled blocks would have plain ops in them whose steps follow a pack's layout."""
    plain = [op for op in ("causal_conv", "gated_delta") if policy.kernels.names.get(op) == "plain"]
    if plain:
        raise ConfigError(
            f"model.compile is on, and {path} has layers whose {' and '.join(plain)} run in plain PyTorch on "
            f"{policy.device.type}: their steps follow the layout of a pack, so blocks would be compiled anew for each "
            "pack. Set model.compile to auto, or to off."
        )


def _load(
    config: RunConfig, device: torch.device, held: torch.dtype, dtype: torch.dtype, layout: Layout, console: Console
) -> tuple[Loaded, Spread | None]:
    """The starting model with matrices in `held`, and how it is spread, if it is, for products in `dtype`."""
    path = config.model.path
    spread: Spread | None = None
    with console.startup.time("weights"), console.bytes_phase("reading weights") as progress:
        if layout.size > 1:
            how = _how_to_spread(config, dtype)
            loaded, spread = load_spread(path, device, held, layout, progress=progress, **how)
        else:
            loaded = load(path, device, held, progress)
    return loaded, spread


def _load_anew(
    config: RunConfig, device: torch.device, held: torch.dtype, dtype: torch.dtype, layout: Layout, console: Console
) -> tuple[Loaded, Policy]:
    """The same of a model on several processes that has been checked, as it will train."""
    if layout.tensor == 1:
        loaded, spread = _load(config, device, held, dtype, layout, console)
        return loaded, Policy.fast(loaded.model, dtype, spread)
    with console.startup.time("weights"), console.bytes_phase("reading weights") as progress:
        how = _how_to_spread(config, dtype)
        return load_split(config.model.path, device, held, layout, progress=progress, **how)


def _how_to_spread(config: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "reduce_dtype": DTYPES[config.parallel.reduce_dtype],
        "product_dtype": dtype,
        "reshard_after_forward": config.parallel.reshard_after_forward,
    }


def _say_how_read(loaded: Loaded, path: str, console: Console) -> None:
    for note in loaded.notes:
        console.print(f"{path}: {note}")
    if not loaded.stored_bytes:
        console.print(f"{path}: the weights are in older files than safetensors; slower to read for large ones")
