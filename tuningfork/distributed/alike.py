"""What must be alike on all processes of a run, compared before it costs time."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping

import torch
import transformers

from tuningfork import __version__
from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import ConfigError

_SHOWN = 60  # characters of a value
_NAMED = 8  # differences in one message


def versions() -> dict[str, str]:
    """Of what decides a run's numbers, as far as a process can tell by itself."""
    return {
        "tuningfork": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": platform.python_version(),
    }


def check_alike(ranks: Ranks, facts: Mapping[str, object], cure: str) -> None:
    """Whether all ranks have the same facts, by their names. All ranks ask, and all get the same answer.

    Raises:
        ConfigError: some have others than the first rank. It names these, their machines and the first few facts.
    """
    own = {name: str(value) for name, value in facts.items()}
    of_all = ranks.all((socket.gethostname(), own))
    (_, first), *others = of_all
    found = [
        (rank, host, name, first.get(name, "nothing"), theirs.get(name, "nothing"))
        for rank, (host, theirs) in enumerate(others, start=1)
        for name in sorted({*first, *theirs})
        if first.get(name) != theirs.get(name)
    ]
    if found:
        more = [f"and {len(found) - _NAMED} more differences"] if len(found) > _NAMED else []
        raise ConfigError(
            "the processes of this run are not alike:",
            *(
                f"  {name}: {theirs[:_SHOWN]} on rank {rank} ({host}), {ours[:_SHOWN]} on rank 0"
                for rank, host, name, ours, theirs in found[:_NAMED]
            ),
            *more,
            cure,
        )
