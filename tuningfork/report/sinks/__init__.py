"""Where the numbers of a run go beside metrics.jsonl: an extension point.

metrics.jsonl is the run's own record, which is always written and is no sink. Each module of this package is one sink,
and its name is the one that `output.sinks` gives it. A module here and a test of it add a sink, and nothing else does:

    class Printed:
        def write(self, step: int, numbers: Mapping[str, float]) -> None: ...
        def close(self) -> None: ...

    def open_sink(folder: Path, first_step: int) -> Printed:
        return Printed()

`folder` is the sink's own: it lies in the run folder beside config.yaml, is named as the sink is, and is made by it if
need be. A run that continues sends `first_step` and later steps anew, so what the sink has of these is void; and where
its held-out examples are others than before, the evaluation of step 0 as well.

A sink that cannot be opened is an error before the first step. One that fails later gets no more numbers, and the run
goes on: that is said at once and again at the end, and metrics.jsonl has the numbers.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from tuningfork.errors import ConfigError, TuningforkError
from tuningfork.wording import did_you_mean, first_line, shortened

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""Every sink there is."""


class Sink(Protocol):
    """Something that takes the numbers of a run."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the finite numbers of a step: those of a line of metrics.jsonl that are not null, by the same names.

        Several calls may be of one step, such as one of training and one of an evaluation.
        """

    def close(self) -> None:
        """Let go of files and connections, also after a `write` that failed."""


class Sinks:
    """Several sinks as one, none of which can end the run.

    Args:
        opened: name -> sink.
        say: takes a line for the user.
    """

    def __init__(self, opened: Mapping[str, Sink], say: Callable[[str], None]) -> None:
        self._opened, self._say = dict(opened), say
        self._failed: dict[str, int] = {}  # name -> the first step that it lacks

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step to every sink; one that fails is named and gets no more."""
        for name, sink in list(self._opened.items()):
            try:
                sink.write(step, numbers)
            except Exception as error:  # of whatever kind its library's are
                self._failed[name] = step
                self._say(
                    f"! output.sinks: {name} failed at step {step:,} ({first_line(error)}) and gets no more numbers. "
                    "The run goes on; metrics.jsonl has them all"
                )
                self._close(name)

    def close(self) -> None:
        """Close every sink, and say again which of them lack numbers."""
        for name in list(self._opened):
            self._close(name)
        for name, step in self._failed.items():
            self._say(f"! {name} lacks the numbers from step {step:,} on; metrics.jsonl has them")

    def _close(self, name: str) -> None:
        try:
            self._opened.pop(name).close()
        except Exception as error:
            if name not in self._failed:
                why = f"could not be closed ({first_line(error)}), so its last numbers may be missing"
                self._say(f"! output.sinks: {name} {why}; metrics.jsonl has them")


def check_names(names: Sequence[str]) -> None:
    """Refuse names that no sink has, and a sink that is named twice.

    Raises:
        ConfigError: says which, and the nearest name that there is.
    """
    for name in names:
        if name not in NAMES:
            hint = did_you_mean(name.lower(), NAMES, cutoff=0.5)
            found = shortened(repr(name), 80)
            raise ConfigError(f"output.sinks has {found}, which is no sink; allowed: {', '.join(NAMES)}.{hint}")
        if names.count(name) > 1:
            raise ConfigError(f"output.sinks names {name} {names.count(name)} times. Keep one.")


def check_installed(names: Sequence[str]) -> None:
    """Refuse sinks whose library is not installed, before minutes are spent.

    Raises:
        ConfigError: names the sink and the library.
    """
    check_names(names)
    for name in names:
        _module(name)


def open_sinks(names: Sequence[str], folder: Path, first_step: int, say: Callable[[str], None]) -> Sinks:
    """Open the sinks of these names for a run in `folder` whose next step is `first_step`, from 1.

    Args:
        say: takes a line for the user, where a sink fails later on.

    Raises:
        ConfigError: a sink cannot be opened, such as where the disk refuses.
        RunFolderError: its folder is a link, or no folder.
    """
    check_names(names)
    opened: dict[str, Sink] = {}
    try:
        for name in names:
            opened[name] = _open(name, folder, first_step)
    except BaseException:
        for sink in opened.values():
            sink.close()
        raise
    return Sinks(opened, say)


def _open(name: str, folder: Path, first_step: int) -> Sink:
    try:
        sink: Sink = _module(name).open_sink(folder / name, first_step)
        return sink
    except TuningforkError:
        raise
    except Exception as error:
        raise ConfigError(
            f"output.sinks: {name} cannot be opened: {first_line(error)}. Mend that, or remove {name} from there."
        ) from error


def _module(name: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise ConfigError(
            f"output.sinks: {name} needs a library that cannot be imported here: {first_line(error)}. Install it, or "
            f"remove {name} from there."
        ) from error
