"""The run folder: made once, continued only when asked, never overwritten.

It is looked at before anything else happens, and made when training begins: a run that never began leaves nothing.
A report of `tuningfork data`, evaluations of `tuningfork eval`, a starting model and what a start that stood still said
of itself may lie in it already. The folder may be a link, and what a run keeps in it may not.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import xxhash

from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import RunFolderError
from tuningfork.files import check_plain, is_aside, read_plain
from tuningfork.report import sinks
from tuningfork.report.dataset import report_files
from tuningfork.report.run import eval_files

_CHECKSUM = "# These settings as the run wrote them have the checksum"
CONFIG = "config.yaml"  # the first file of a run, written once the reference is scored and before the first step
ROWS = "data_rows.json"  # the account of every row that the run read
CHECKPOINTS = "checkpoints"
START = "start"  # the starting model, where it was made from nothing

LOG = "log.txt"  # grows line by line, as the next does; all other files are replaced as a whole
STALLS = "stalls.txt"  # what every thread was doing when the run stood still; of rank 3 stalls.3.txt
_STALLS = re.compile(r"stalls(\.[0-9]+)?\.txt")
FILES = (CONFIG, ROWS, "metrics.jsonl", LOG, STALLS, "eval.json", "summary.json", "export.json")
FOLDERS = (CHECKPOINTS, START, "model", eval_files.FOLDER, *sinks.NAMES)

# Settings that may change between a run and its continuation: they decide where, how often, whether it stops before its
# last step, and at most how gradients are rounded. model.path and model.dtype may be spelt anew: a checkpoint knows
# which model and dtype they must name.
FREE_TO_CHANGE = (
    *("output.", "train.device", "train.activation_memory", "train.gradient_dtype"),
    *("reference.cache", "objective.head_chunk_rows", "train.eval_every"),
    *("train.early_stopping_patience", "train.early_stopping_threshold"),
    *("data.cache", "data.workers", "parallel."),
    *("model.path", "model.dtype"),
)

LENGTH = ("train.epochs", "train.max_steps")  # they may be raised, see extend.py


def has_begun(folder: Path) -> bool:
    """Whether there is a run to go on with."""
    return os.path.lexists(folder / CONFIG)


def stalls_of(folder: Path, rank: int) -> Path:
    """Where a rank says what it was doing when the run stood still."""
    path = folder / STALLS
    return path.with_suffix(f".{rank}.txt") if rank else path


def to_go_on(folder: Path, ranks: Ranks = ONE_PROCESS) -> str:
    """The command that continues the run of a folder, with all settings that it has, on as many processes."""
    nodes = ranks.size // ranks.per_node
    several = f"--nodes {nodes} --rendezvous HOST:PORT " if nodes > 1 else ""
    launch = f"launch {several}--processes {ranks.per_node} " if ranks.size > 1 else ""
    return f"tuningfork {launch}train {shlex.quote(str(folder / CONFIG))} --resume"


def check_run_folder(folder: Path, resume: bool) -> None:
    """Whether a run may begin in this folder, or with `resume` go on there. It may be absent.

    Raises:
        RunFolderError: it holds a run and `resume` is not given, or none and it is; or it holds something else, or
            something under a run's names that no run makes, such as a link.
    """
    found = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    may_be = (report_files.FOLDER, eval_files.FOLDER, START)
    others = {name for name in found if name not in may_be and not is_aside(name) and not _STALLS.fullmatch(name)}
    if others and not has_begun(folder):
        raise RunFolderError(f"{folder} is no run folder: it has files, but no {CONFIG}. Choose another output.dir.")
    if has_begun(folder) and not resume:
        raise RunFolderError(f"{folder} exists. Add --resume to continue that run, or choose another output.dir.")
    if resume and not has_begun(folder):
        runs = [path.parent.name for path in folder.parent.glob(f"*/{CONFIG}")]
        near = difflib.get_close_matches(folder.name, runs, n=3, cutoff=0.5)
        beside = f" Did you mean {' or '.join(str(folder.parent / name) for name in near)}?" if near else ""
        raise RunFolderError(
            f"--resume: there is no run in {folder} to continue: it {'has' if found else 'holds'} no {CONFIG}, which a "
            f"run writes before its first step.{beside} To begin one there, give the command without --resume: what "
            "was scored for the reference already is used."
        )
    for name in (*FILES, *FOLDERS):
        check_plain(folder / name, folder=name in FOLDERS, writes=name in (LOG, STALLS))


def read_config(folder: Path) -> str | None:
    """The settings of the run in a folder, as text; None where there is no run.

    Raises RunFolderError, also where they are not as they were written.
    """
    path = folder / CONFIG
    try:
        text = read_plain(path).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}.") from error
    first, _, rest = text.partition("\n")
    if _CHECKSUM in first and first + "\n" + rest != with_checksum(rest):
        raise RunFolderError(
            f"{path} is not as the run wrote it. Restore it; or, if it was changed on purpose, remove its first line, "
            "which has its checksum."
        )
    return text


def with_checksum(settings: str) -> str:
    """The text of a run's config.yaml: a line with a checksum, which YAML passes over, then its settings."""
    return f"{_CHECKSUM} {xxhash.xxh3_128_hexdigest(settings.encode(errors='backslashreplace'))}\n{settings}"


def check_settings(folder: Path, changes: Mapping[str, tuple[object, object]], defaults: Mapping[str, object]) -> None:
    """Whether a run may go on with other settings than it has: `changes` are dotted key -> (the run's value, now).
    `defaults` are what settings have that are not given.

    Raises:
        RunFolderError: they decide more than where and how often.
    """
    changed = {key: values for key, values in changes.items() if not key.startswith(FREE_TO_CHANGE)}
    if changed.get("data.date", ("",))[0] is None:  # the run's day was taken out: its data will tell
        del changed["data.date"]
    for key in LENGTH:
        old, new = changed.get(key, (None, None))
        if not (isinstance(old, int | float) and isinstance(new, int | float) and new < old):
            changed.pop(key, None)  # the data will tell whether the run becomes longer
    if changed:
        lines = [
            f"  {key}: the run has {old!r}, now {new!r}{', the default' if new == defaults[key] else ''}"
            for key, (old, new) in changed.items()
        ]
        free = ", ".join(f"{key}*" if key.endswith(".") else key for key in FREE_TO_CHANGE)
        raise RunFolderError(
            f"{folder} is a run with other settings:",
            *lines,
            f"A continued run must have the same, given again: {to_go_on(folder)} gives all that it has. Beside them "
            f"may be given: {' and '.join(LENGTH)}, if they are raised; {free}. Or choose another output.dir.",
        )
