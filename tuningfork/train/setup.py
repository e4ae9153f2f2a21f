"""From a recipe to everything a run works with: data, starting model, reference."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tuningfork.data.audit import account_line, check_names_used, prepare
from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.loader import packs_in_windows
from tuningfork.data.overlap import overlap
from tuningfork.data.pack import PackLimits, split_fitting
from tuningfork.data.sources import Use, check_sources
from tuningfork.data.store import Selection
from tuningfork.errors import READING, ConfigError, DataError, enough_memory
from tuningfork.models import activations, export
from tuningfork.models.config import ModelConfig
from tuningfork.models.load import Loaded, comparable, load, load_config
from tuningfork.models.policy import Policy
from tuningfork.models.support import positions
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.head import Head
from tuningfork.objective.objectives import PreferenceObjective
from tuningfork.records import DataReport, PackedBatch, TokenExample, column
from tuningfork.reference.build import check_rescored, fill, to_rescore
from tuningfork.reference.code import model_code_digest
from tuningfork.reference.entries import open_entry
from tuningfork.reference.fingerprint import fingerprint, tensors_of, text_digest, weights_digest
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.console import Console
from tuningfork.train import checkpoint
from tuningfork.train.config import TrainConfig
from tuningfork.train.fit import settle
from tuningfork.train.head_check import check_head
from tuningfork.train.kernel_check import KernelCheck
from tuningfork.train.optimizer import hold_gradients, optimizer_bytes
from tuningfork.train.score import score
from tuningfork.train.self_check import check_packed_equals_alone, window_not_reached
from tuningfork.wording import counted

# Variable that holds the number of processes -> who sets it. SLURM_NTASKS is not among them: it is what was asked for,
# also where a batch script then starts one process.
LAUNCHERS = {
    "WORLD_SIZE": "torchrun, accelerate or deepspeed",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Data:
    """Examples to train on and held-out ones, each with the account of its file. The objective takes all of them.

    Without training data, as to evaluate, its account is empty.
    """

    train: Sequence[TokenExample]
    train_report: DataReport
    held_out: Sequence[TokenExample]
    held_out_report: DataReport | None
    limits: PackLimits


@dataclass(frozen=True)
class Start:
    """The starting model, ready to score and to train."""

    policy: Policy
    head: Head
    objective: PreferenceObjective
    loaded: Loaded
    compiled: bool
    check: KernelCheck | None = None  # where blocks are compiled, or kernels are not the plain ones

    def score(self, batch: PackedBatch) -> Tensor:
        """Summed log-probs of a pack's answers under the policy as it is now, float64 [A] on its device."""
        return score(self.policy, self.head, batch)

    def packs(self, examples: Sequence[TokenExample], limits: PackLimits) -> Iterator[PackedBatch]:
        """All examples in packs, for scoring: each is built, and pinned for a GPU, while the one before is scored."""
        return packs_in_windows(examples, limits, pin_memory=self.policy.device.type == "cuda")


def check_one_process() -> None:
    """Refuse to be one process of several: each would do all of the work, in the same folders. Raises ConfigError."""
    for name, launcher in LAUNCHERS.items():
        started = os.environ.get(name, "").strip()
        if started.isdecimal() and int(started) > 1:
            raise ConfigError(
                f"{name} is {started}: {launcher} has started several processes, and each would do the whole of the "
                "work. tuningfork trains in one process, on one GPU: give the command without a launcher."
            )


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ConfigError where cuda is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda, but PyTorch sees no GPU. Use --train.device cpu, or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and for bfloat16 weights, else float32."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    return torch.bfloat16 if device.type == "cuda" or model.weights == "bfloat16" else torch.float32


def choose_compile(name: str, device: torch.device) -> bool:
    """`auto` compiles on a GPU."""
    return name == "on" or (name == "auto" and device.type == "cuda")


def read_data(
    model: ModelConfig,
    data: DataConfig,
    pack: PackConfig,
    objective: PreferenceObjective,
    tokenizer: PreTrainedTokenizerBase,
    compiled: bool,
    console: Console,
    train_too: bool = True,
) -> Data:
    """Read, tokenize and audit the recipe's files, for every command that scores them. `data` has a date.

    Args:
        train_too: read data.train; otherwise data.eval alone, and there need be no other.

    Raises:
        DataError: a file or a row cannot be used, or a row is none that the objective has a loss for.
        ModelError: the model's config cannot be used.
    """
    assert data.date is not None, "two files, and a resumed run, could get two dates"
    config = load_config(model.path)
    if data.eval is not None:
        check_sources(data.eval, "eval")
    train: Sequence[TokenExample] = []
    held_out: Sequence[TokenExample] = []
    train_report, held_out_report = DataReport(), None
    if train_too:
        train, train_report = read_sources(data.train, tokenizer, data, pack, config.vocab_size, console)
    if data.eval is not None:
        held_out, held_out_report = read_sources(
            data.eval, tokenizer, data, pack, config.vocab_size, console, use="eval"
        )
    if train_too and held_out_report and (shared := overlap(train, train_report, held_out, held_out_report)):
        console.print(f"! {shared}")
    if train_too or not data.train:  # names of fields may be meant for rows that are not read now
        check_names_used(data, *(report for report in (train_report, held_out_report) if report is not None))
    examples, longest = Selection([train, held_out]), positions(config)
    lengths = column(examples, "longest")
    if longest and lengths.max() > longest:
        scaled = longest < (getattr(config, "max_position_embeddings", None) or longest)
        why = " before its rotary scaling makes examples depend on their neighbours in a pack" if scaled else ""
        raise DataError(
            f"{examples[int(lengths.argmax())].id} has {lengths.max()} tokens, but {model.path} knows {longest} "
            f"positions{why}. Set data.max_length to {longest} or less."
        )
    for part in (train, held_out):
        objective.check(part)
    limits = PackLimits.plan(pack.tokens, pack.share_prompt, compiled)
    return Data(train, train_report, held_out, held_out_report, limits)


def read_sources(
    sources: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    pack: PackConfig,
    vocab_size: int,
    console: Console,
    use: Use = "train",
) -> tuple[Sequence[TokenExample], DataReport]:
    """The examples of all sources that a run would use, and the account of their rows. Raises DataError."""
    check_sources(sources, use)  # before its reading is said to have begun
    name = Path(sources).name if isinstance(sources, str) else counted(len(sources), "source")
    with enough_memory(f"reading {name}", READING), console.phase(f"reading {name}", total=0, unit="rows") as phase:

        def progress(done: int, total: int) -> None:
            phase.total = total
            phase.advance(done - phase.done)

        cache = None if data.cache is None else Path(data.cache)
        prepared, report = prepare(sources, tokenizer, data, vocab_size, progress, use, cache, console.print)
    examples, too_large = split_fitting(prepared, pack.tokens, pack.share_prompt)
    report.used = len(examples)
    report.dropped_rows += too_large
    if not examples:
        raise DataError(
            f"{', '.join(report.sources)}: no example fits a pack of {pack.tokens} rows. Raise pack.tokens."
        )
    console.print(account_line(name, report))
    return examples, report


def start_model(
    model: ModelConfig,
    objective: ObjectiveConfig,
    pack: PackConfig,
    train: TrainConfig,
    device: torch.device,
    console: Console,
) -> Start:
    """Load the starting model, check that packing it is exact, put kernels and compiler under it, and check these.

    It keeps activations as `train.activation_memory` says; where that is auto, as little of them as scoring allows,
    until `settle_activations`.

    Raises:
        ConfigError: something that the settings ask for cannot be had here.
        ModelError: the model cannot be loaded, packing it is not exact, or its kernels are wrong on this device.
    """
    dtype = choose_dtype(model, device)
    compiled = choose_compile(model.compile, device)
    # What cannot be had is said now, before minutes of reading and scoring.
    activations.check(train.activation_memory, compiled)
    with console.stage("device", f"setting up {device_name(device)}"):
        torch.zeros(1, device=device)  # the first use of a GPU sets it up, which is no part of what follows
    with console.startup.time("weights"):
        loaded = _load(model, device, console)
    with console.stage("self-check", "checking that packed examples equal the same ones alone"):
        check_packed_equals_alone(loaded.model, model.path)
        export.check(loaded, model.path)
    hold_gradients(loaded.model, train)
    policy = Policy.fast(loaded.model, dtype)
    head = Head(policy.kernels, policy.transform, objective.head_chunk_rows)
    with console.stage("head check", "checking the head"):
        check_head(policy, head, model.path)
    check = None
    if compiled or not policy.has_plain_kernels:
        with console.stage("kernel check", "computing what kernels and compiled blocks are checked against"):
            check = KernelCheck.begin(policy, model.path, pack.share_prompt, compiled)
    if compiled:
        policy.compile()
    console.print(
        f"{model.path}: {sum(p.numel() for p in loaded.model.parameters()):,} parameters on {device_name(device)}, "
        f"kept in {model.weights}, computing in {dtype_name(dtype)}, "
        + ", ".join(f"{kind} kernel {name}" for kind, name in policy.kernels.names.items())
        + (", blocks compiled" if compiled else "")
    )
    if model.weights == "bfloat16" and train.gradient_dtype == "weights":
        console.print(
            "gradients are added up in bfloat16 where their weights are, so how a batch is cut into packs changes the "
            "rounding of a step; train.gradient_dtype: float32 costs 2 more bytes a weight and does not round"
        )
    policy.keep_activations("block" if train.activation_memory == "auto" else train.activation_memory)
    if check is not None:
        with console.stage("kernel check", "compiling and checking kernels and blocks"):
            check.compare(policy)
    if window := window_not_reached(policy):
        console.print(f"checks at the start: not beyond the layers' window of {window:,}, which is too long for that")
    return Start(policy, head, PreferenceObjective(objective), loaded, compiled, check)


def settle_activations(
    start: Start, train: TrainConfig, limits: PackLimits, last: Path | None, console: Console
) -> None:
    """Carry out `train.activation_memory: auto` before anything is scored: the fastest mode that fits.

    A run that goes on from its checkpoint `last` keeps the mode that it began with, whatever else is on the GPU now:
    gradients are rounded differently in another.

    Raises:
        ConfigError: no mode fits.
        ModelError: the blocks, compiled anew for that mode, are wrong on this device.
    """
    if train.activation_memory != "auto":
        return
    if last is not None:
        mode = checkpoint.progress(last).activation_memory
        start.policy.keep_activations(mode)
        console.print(f"activation memory: {mode}, as chosen when the run began")
    else:
        with console.startup.time("activation memory"):
            settle(start.policy, start.head, limits, partial(optimizer_bytes, config=train), console)
    if start.check is not None and start.policy.activation_memory != "block":  # which `start_model` has compared
        with console.stage("kernel check", "compiling and checking kernels and blocks"):
            start.check.compare(start.policy)


def _load(model: ModelConfig, device: torch.device, console: Console) -> Loaded:
    with console.bytes_phase("reading weights") as progress:
        loaded = load(model.path, device, DTYPES[model.weights], progress)
    for note in loaded.notes:
        console.print(f"{model.path}: {note}")
    if not loaded.stored_bytes:
        console.print(f"{model.path}: the weights are in older files than safetensors; slower to read for large ones")
    return loaded


def open_reference(
    start: Start,
    share_prompt: bool,
    cache: str,
    examples: Sequence[TokenExample],
    limits: PackLimits,
    console: Console,
    held_out: Sequence[TokenExample] = (),
    weights: str | None = None,
) -> ReferenceStore:
    """The entry of the reference cache that is the *starting* model's, filled for these examples and the held-out ones.

    `weights` is the hash of its weights, where that is known already. Some of what the entry had before is scored
    again, and must come to the same bits. Raises ReferenceMismatch.
    """
    policy = start.policy
    facts = fingerprint(
        weights or starting_weights(policy, console),
        config=_config_digest(policy),
        dtype=dtype_name(policy.dtype),
        **{f"{kind} kernel": name for kind, name in policy.kernels.names.items()},
        compiled=str(start.compiled),
        share_prompt=str(share_prompt),
        device=device_name(policy.device),
        threads=str(torch.get_num_threads() if policy.device.type == "cpu" else "any"),
        transformers=transformers.__version__,
        **{"model code": model_code_digest(policy.model)},
    )
    with console.startup.time("reference"):
        store = open_entry(Path(cache), facts, console.print)
        parts = [Selection([examples]), Selection([held_out])]
        again = Selection([parts[part].take(places) for part, places in to_rescore(store, parts)])
        if again:
            console.print(
                f"{len(again):,} of the cached examples, some of every file, are scored again: log-probs of other code "
                "or of another machine would differ, and spoil every margin"
            )
            with console.phase("checking the reference cache", total=len(again), unit="examples") as phase:
                check_rescored(store, start.packs(again, limits), start.score, phase.advance)
        missing = store.missing(Selection(parts))
        if missing:
            with console.phase("scoring the reference", total=len(missing), unit="examples") as phase:
                fill(store, start.packs(missing, limits), start.score, phase.advance)
    return store


def starting_weights(policy: Policy, console: Console) -> str:
    """The hash of the weights as they are: to be asked for before they move."""
    with console.stage("weights digest", "hashing the weights"):
        return weights_digest(tensors_of(policy.model))


def model_digest(policy: Policy, weights: str) -> str:
    """A content hash of a model: of its weights, by their own hash, and of what its config decides of its numbers."""
    return text_digest(f"{weights} {_config_digest(policy)}")


def _config_digest(policy: Policy) -> str:
    return text_digest(repr(sorted(comparable(policy.config).items())))


def dtype_name(dtype: torch.dtype) -> str:
    """As a recipe spells it."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's instruction set: what decides the bits of a matrix product."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
