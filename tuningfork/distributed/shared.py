"""Folders that all machines of a run must see as one: whether they do is tried before minutes are spent."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import ConfigError

PATIENCE = 5.0  # seconds; a network file system may show a new file late
_NAMED = 4  # machines in one message


class Seen(NamedTuple):
    """A folder, or what is there of those above it, as one process sees it."""

    path: Path
    refused: str | None  # why the first process cannot write there; None on the others
    sees_first: bool  # whether what the first process writes there is there; also where it writes nothing


def seen(ranks: Ranks, wanted: Path) -> Seen:
    """Whether this process sees what the first one writes to a folder. All must ask; the folder is not made, and
    nothing stays there.

    Each looks as many folders above the one that is wanted as the first must go to find one: what is missing there may
    be of a machine's own here.
    """
    above = [wanted.absolute(), *wanted.absolute().parents]
    levels = next(number for number, folder in enumerate(above) if folder.is_dir())
    levels, name = ranks.from_first((levels, f".tuningfork-check-{uuid.uuid4().hex}"))
    path = above[min(levels, len(above) - 1)]
    token = path / name
    refused = refusal(lambda: token.write_text(name)) if ranks.first else None
    nothing_to_see = ranks.from_first(refused) is not None  # which comes when it is written
    sees_first = nothing_to_see or _comes(token)
    ranks.barrier()
    if ranks.first:
        token.unlink(missing_ok=True)
    return Seen(path, refused, sees_first)


def check_shared(ranks: Ranks, folders: Mapping[str, str]) -> None:
    """Whether all machines see the same folders, which are setting -> path. All ranks must ask.

    Raises:
        ConfigError: some do not see what the first one writes there; it names them.
    """
    if ranks.size == 1:
        return
    for setting, wanted in folders.items():
        of_all = ranks.all((socket.gethostname(), seen(ranks, Path(wanted)).sees_first))
        blind = list(dict.fromkeys(f"{host} (rank {rank})" for rank, (host, sees) in enumerate(of_all) if not sees))
        if blind:
            more = f" and {len(blind) - _NAMED} more" if len(blind) > _NAMED else ""
            raise ConfigError(not_shared(setting, wanted, f"rank 0 ({of_all[0][0]})", ", ".join(blind[:_NAMED]) + more))


def not_shared(setting: str, path: str, writer: str, blind: str) -> str:
    """What to say of a folder that some machines do not see."""
    return (
        f"{setting} {path}: what {writer} writes there is not seen by {blind}. All machines must see one folder there: "
        "put it on a file system that they share."
    )


def refusal(act: Callable[[], object]) -> str | None:
    """Why a disk refuses; None where it does not."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _comes(token: Path) -> bool:
    """Whether a file is there, with its name as its content, or comes in a while."""
    until = time.monotonic() + PATIENCE
    while True:
        with suppress(OSError):  # it is not there, or not to be read
            if token.read_text() == token.name:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
