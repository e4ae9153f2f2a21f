"""Checkpoints: whole or absent, in torch.distributed.checkpoint's format, resumed bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from pydantic import Field, TypeAdapter, ValidationError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException  # private: torch.distributed.checkpoint.api
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tuningfork.distributed.layout import ONE, Layout
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import RunFolderError
from tuningfork.files import DIGESTS, check_plain, check_sealed, clear_abandoned, read_plain, remove
from tuningfork.json_files import as_object
from tuningfork.models.config import ACTIVATION_MEMORY
from tuningfork.report.run.metrics import Evaluation
from tuningfork.train.average import AVERAGE
from tuningfork.train.checkpoint_reader import Foreign, PlainPlanner, PlainReader
from tuningfork.train.checkpoint_writer import one_process, write
from tuningfork.train.loss_scale import LossScale
from tuningfork.train.own_shards import make_moments
from tuningfork.train.staging import StagedPlanner, Staging
from tuningfork.wording import first_line

_NAME = re.compile(r"step-([1-9][0-9]*)")
_PROGRESS = "progress.json"
_TENSORS = 5  # at most, of each weight: itself, two moments, its average, and how many steps it has moved
_BEFORE_IT = "Remove that folder; --resume then takes the checkpoint before it."


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, beside its tensors. The data's position is the number of examples trained on."""

    step: Annotated[int, Field(ge=1)]  # steps done; 0 where there is no checkpoint yet
    examples: Annotated[
        int, Field(ge=1)
    ]  # trained on in these; the last step of a run by epochs may hold fewer than the others
    data_digest: str  # of the examples trained on; a resumed run must have the same
    start_model: str  # content hash of the model the run started from, and so of its reference
    dtype: str  # of the computation; `model.dtype: auto` names another one on another device
    activation_memory: Annotated[
        str, Field(pattern=ACTIVATION_MEMORY)
    ]  # the mode in force; `train.activation_memory: auto` keeps it
    held_out_digest: str  # of the held-out examples
    before: Evaluation | None  # the starting model on these; None where there are none
    layout: Layout = ONE  # of the processes; gradient norms are rounded differently in another one
    loss_scale: LossScale | None = None  # of a run in float16


def save(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep_last: int,
    best: int | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Path:
    """Write ``step-N`` in `folder`, then `prune` those before it. All ranks must ask together.

    Raises:
        RunFolderError: the disk refuses. What was there before is still whole.
        SaidElsewhere: it refuses on another rank.
    """
    return _save(folder, progress, _state(model, optimizer), None, keep_last, best, ranks)


def saving(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep_last: int,
    best: int | None,
    ranks: Ranks,
    staging: Staging,
) -> Callable[[], Path]:
    """What does as `save` does, for a thread: tensors are copied now. Before the next call it must be done.

    Args:
        ranks: who talk through a group of their own, see `Ranks.apart`.
    """
    state = _state(model, optimizer)
    return partial(_save, folder, progress, state, staging.copy(state), keep_last, best, ranks)


def _save(
    folder: Path,
    progress: Progress,
    state: dict[str, Any],
    staged: StagedPlanner | None,
    keep_last: int,
    best: int | None,
    ranks: Ranks,
) -> Path:
    path = at(folder, progress.step)
    # It is there where a run was killed between this save and its end, and came by again; or where one was the best.
    if not ranks.from_first(path.exists()):
        write(path, state, (_PROGRESS, json.dumps(asdict(progress))), ranks, staged)
    prune(folder, keep_last, best, ranks)
    return path


def prune(folder: Path, keep_last: int, best: int | None, ranks: Ranks = ONE_PROCESS) -> None:
    """Remove all checkpoints but the newest `keep_last` and that of step `best`, and none that holds foreign files. The
    first rank does so, while the others wait."""
    with ranks.agreeing():
        for old in _all(folder)[:-keep_last] if ranks.first else ():
            if (best is None or old != at(folder, best)) and _is_ours(old):
                remove(old)


def at(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return folder / f"step-{step}"


def newest(folder: Path, ranks: Ranks = ONE_PROCESS) -> Path | None:
    """The newest whole checkpoint, as the first rank finds it. It clears away what a kill left half written or half
    removed. All ranks must ask together.

    Raises RunFolderError where something by a checkpoint's name is no folder; SaidElsewhere on the other ranks.
    """
    found: list[Path] = []
    with ranks.agreeing():
        if ranks.first:
            clear_abandoned(folder, held=True)
            found = _all(folder)
    return ranks.from_first(found[-1] if found else None)


def progress(path: Path) -> Progress:
    """Where the run of a checkpoint stood. Raises RunFolderError if it is damaged, or of another version."""
    try:
        saved = as_object(read_plain(path / _PROGRESS))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    other = {field.name for field in fields(Progress)} ^ saved.keys()
    if isinstance(before := saved.get("before"), dict):
        other |= {f"before.{name}" for name in {field.name for field in fields(Evaluation)} ^ before.keys()}
    if other:
        raise RunFolderError(
            f"{path} was written by another version of tuningfork ({_PROGRESS} differs in {', '.join(sorted(other))}). "
            "Continue with that version, or begin a new run in another output.dir."
        )
    try:
        check_sealed(path, only=(_PROGRESS,))
        found = TypeAdapter(Progress).validate_json(json.dumps(saved, allow_nan=False), strict=True)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise _damaged(path, ValueError(f"{_PROGRESS}: {wrong}")) from error
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if asdict(found) != saved:  # which has names beside these
        raise _damaged(path, ValueError(f"{_PROGRESS} is not as it was written"))
    if found.before is not None and found.before.means.sums.keys() != found.before.means.counts.keys():
        raise _damaged(path, ValueError(f"{_PROGRESS}: before.means: counts other statistics than it sums"))
    if found.activation_memory == "auto":
        raise _damaged(path, ValueError(f"{_PROGRESS}: activation_memory: auto is none that a run can have had"))
    if path.name != at(path.parent, found.step).name:
        raise _damaged(path, ValueError(f"{_PROGRESS}: step: it is {found.step}"))
    return found


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks = ONE_PROCESS) -> Progress:
    """Load a checkpoint into model, optimizer and the random generator. Nothing in its files is run.

    All ranks must ask together. Weights may be spread over them in another way than over those that wrote it: each rank
    reads the pieces that hold what it has.

    Raises:
        RunFolderError: the checkpoint is damaged, belongs to another model, or holds more than tensors and plain
            values.
        SaidElsewhere: so another rank has found.
    """
    make_moments(optimizer)
    state = _state(model, optimizer)
    stood = _load(path, state, ranks)
    for name, average in state.get(AVERAGE, {}).items():
        state["optimizer"]["state"][name][AVERAGE] = average
    moments = get_optimizer_state_dict(model, optimizer) | state["optimizer"]
    try:
        torch.set_rng_state(state["rng"])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=moments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error
    if not any(of_weight["step"] for of_weight in optimizer.state.values()):
        optimizer.state.clear()  # the first step that moves the weights begins it, and the average
    return stood


def restore_weights(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks = ONE_PROCESS) -> None:
    """Load a checkpoint's weights alone into a model, or where the optimizer keeps their average, that. Raises
    RunFolderError, SaidElsewhere as `restore`."""
    state = {name: part for name, part in _state(model, optimizer).items() if name in ("model", AVERAGE)}
    _load(path, state, ranks, "Remove that folder, or set output.export: last; then --resume exports another step.")
    set_model_state_dict(model, state["model"])
    if AVERAGE in state:  # of weights alone, of which one with two names has one here
        set_model_state_dict(model, state[AVERAGE], options=StateDictOptions(strict=False))


def _load(path: Path, state: dict[str, Any], ranks: Ranks, cure: str = _BEFORE_IT) -> Progress:
    """Fill what stands in `state` from a checkpoint, and say where the run stood. Raises RunFolderError.

    Its files are dealt out to be hashed, so that each is read for it once; nothing is loaded before all are known to be
    as they were written.
    """
    try:
        with ranks.agreeing():
            sealed = [*as_object(read_plain(path / DIGESTS))]
            check_sealed(path, only=sealed[ranks.rank :: ranks.size])
        stood = progress(path)
        with ranks.agreeing(), one_process():
            most = _TENSORS * len(state["model"])
            # Each its own, by itself.
            dcp.load(
                state,
                storage_reader=PlainReader(path, most, stood.layout.size),
                planner=PlainPlanner(),
                no_dist=True,
            )
        return stood
    except (CheckpointException, OSError, ValueError, KeyError, TypeError) as error:
        cause = error.failures[0][0] if isinstance(error, CheckpointException) and error.failures else error
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise _damaged(path, cause, cure) from error


def _damaged(path: Path, cause: BaseException, cure: str = _BEFORE_IT) -> RunFolderError:
    if isinstance(cause, Foreign):
        cure = "Whoever made it can have changed the rest of the run, too: begin a new one in another output.dir."
    return RunFolderError(f"{path} cannot be loaded ({first_line(cause)}). {cure}")


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a run goes on from. What decides how it moves on, such as weight decay, stands in its recipe alone.

    Where every step so far was skipped, as float16 may do with the first ones, moments are 0; the optimizer has none
    before this and none after it, for to save must change nothing.
    """
    begun = bool(optimizer.state)
    make_moments(optimizer)
    weights, kept = get_state_dict(model, optimizer)
    if not begun:
        optimizer.state.clear()
    moments, averages = {}, {}
    for name, of_weight in cast(dict[str, dict[str, Any]], kept["state"]).items():
        moments[name] = {kind: value for kind, value in of_weight.items() if kind != AVERAGE}
        if AVERAGE in of_weight:
            averages[name] = of_weight[AVERAGE]
    # The host's generator is enough: what a step draws on a GPU, it draws from a seed of its own.
    state = {"model": weights, "optimizer": {"state": moments}, "rng": torch.get_rng_state()}
    return state | ({AVERAGE: averages} if averages else {})


def _all(folder: Path) -> list[Path]:
    """Every checkpoint, the oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    for _, path in found:
        check_plain(path, folder=True)
    return [path for _, path in sorted(found)]


def _is_ours(path: Path) -> bool:
    """Whether a checkpoint holds what was written there and nothing else, so that nobody's own files go with it."""
    try:
        sealed = as_object(read_plain(path / DIGESTS))
    except (OSError, ValueError, RunFolderError):
        return False
    return {entry.name for entry in path.iterdir()} <= {*sealed, DIGESTS}
