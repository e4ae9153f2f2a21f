"""What is found on the processes of a cluster before a run, and what of it would stop or slow one. Nothing is measured
here, see measure.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from tuningfork.distributed.shared import not_shared

APART = 1.0  # seconds between clocks: times in logs and of files then tell no order any more
SLOW_LINK = 0.5  # of the median of its kind
SLOW_RANK = 0.8  # of the median; all wait for the slowest in every step
LEAST_FREE = 1 << 30  # bytes; no checkpoint of a model worth several processes fits in less
WITHIN, BETWEEN = "within a machine", "between machines"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a run writes to, as one process sees it."""

    path: str  # it, or what is there of the folders above it
    shared: bool  # whether all processes must see what one writes
    refused: str | None = None  # why it cannot be written
    sees_first: bool = True  # whether the file of the first process is there, with its content
    free: int = 0  # bytes
    written: float | None = None  # bytes a second to the disk itself; None where another of the machine measured


@dataclass(frozen=True, slots=True)
class Report:
    """What one process found."""

    rank: int
    host: str
    node: int  # the number of its machine
    device: str
    versions: Mapping[str, str]  # what should be the same everywhere -> what it is here
    clock: float  # seconds that its clock is ahead of the first one's
    folders: Mapping[str, Folder]  # setting -> its folder
    compute: float  # floating-point operations a second
    link: float | None = None  # bytes a second from the rank before it, the last for the first; None where it is alone
    collectives: Mapping[str, float] = field(default_factory=dict)  # such as "all-reduce 16 MiB" -> bytes a second


@dataclass(frozen=True, slots=True)
class Link:
    """What goes from one process to the next."""

    source: Report
    target: Report

    @property
    def rate(self) -> float:
        """Bytes a second."""
        assert self.target.link is not None
        return self.target.link

    @property
    def kind(self) -> str:
        """Whether it leaves the machine: links of one kind should be equally fast."""
        return WITHIN if self.source.node == self.target.node else BETWEEN

    def __str__(self) -> str:
        return f"from {_name(self.source)} to {_name(self.target)}"


def links(reports: Sequence[Report]) -> list[Link]:
    """The ring of all processes; none where there is one."""
    before = [reports[-1], *reports[:-1]]
    return [Link(source, target) for source, target in zip(before, reports, strict=True) if target.link is not None]


def medians(ring: Iterable[Link]) -> dict[str, float]:
    """Kind of link -> the median of its rates, in bytes a second."""
    by_kind: dict[str, list[float]] = {}
    for link in ring:
        by_kind.setdefault(link.kind, []).append(link.rate)
    return {kind: median(rates) for kind, rates in by_kind.items()}


def findings(reports: Sequence[Report]) -> list[str]:
    """What would stop or slow a run, a sentence each that names the process and what to do; empty where all is well."""
    return [
        *_versions(reports),
        *_clocks(reports),
        *_folders(reports),
        *_links(reports),
        *_compute(reports),
    ]


def _versions(reports: Sequence[Report]) -> Iterator[str]:
    for what in reports[0].versions:
        found = _grouped((report, report.versions.get(what, "none")) for report in reports)
        if len(found) > 1:
            said = "; ".join(f"{value} on {_names(those)}" for value, those in found.items())
            yield f"{what} is not the same everywhere, so numbers may differ too: {said}. Give all the same."


def _clocks(reports: Sequence[Report]) -> Iterator[str]:
    for host, those in _grouped((report, report.host) for report in reports).items():
        ahead = median(report.clock for report in those)
        if abs(ahead) > APART:
            word = "ahead of" if ahead > 0 else "behind"
            yield f"the clock of {host} is {abs(ahead):.1f} s {word} that of {reports[0].host}. Let NTP set it."


def _folders(reports: Sequence[Report]) -> Iterator[str]:
    for setting, first in reports[0].folders.items():
        here = [(report, report.folders[setting]) for report in reports]
        for why, those in _grouped((report, folder.refused) for report, folder in here if folder.refused).items():
            yield f"{setting} {first.path} cannot be written by {_names(those)}: {why}. Make room or permit it."
        if blind := [report for report, folder in here if folder.shared and not folder.sees_first]:
            yield not_shared(setting, first.path, _name(reports[0]), _names(blind))
        full = [(report, folder.free) for report, folder in here if not folder.refused and folder.free < LEAST_FREE]
        for free, those in _grouped(full).items():
            yield f"{setting} {first.path} has {free / 2**20:,.0f} MiB free on {_names(those)}. Make room."


def _links(reports: Sequence[Report]) -> Iterator[str]:
    ring = links(reports)
    usual = medians(ring)
    for link in ring:
        if link.rate < SLOW_LINK * usual[link.kind]:
            yield (
                f"the link {link} carries {link.rate / 1e9:.3g} GB/s, less than half of the "
                f"{usual[link.kind] / 1e9:.3g} GB/s that are usual {link.kind}. Look at its cables, at the network "
                "that NCCL took (NCCL_DEBUG=INFO says it), and at what else runs there."
            )


def _compute(reports: Sequence[Report]) -> Iterator[str]:
    usual = median(report.compute for report in reports)
    for report in reports:
        if report.compute < SLOW_RANK * usual:
            yield (
                f"{_name(report)} computes {report.compute / 1e12:.3g} TFLOP/s, where {usual / 1e12:.3g} are usual: "
                "every step of a run waits for it. Look at its clocks and temperature, and at what else runs there."
            )


def _grouped(pairs: Iterable[tuple[Report, Value]]) -> dict[Value, list[Report]]:
    found: dict[Value, list[Report]] = {}
    for report, value in pairs:
        found.setdefault(value, []).append(report)
    return found


def _name(report: Report) -> str:
    return f"rank {report.rank} ({report.host})"


def _names(reports: Sequence[Report]) -> str:
    """Processes in words, by their machines."""
    by_host = _grouped((report, report.host) for report in reports)
    return ", ".join(
        f"{host} ({'rank' if len(those) == 1 else 'ranks'} {', '.join(str(report.rank) for report in those)})"
        for host, those in by_host.items()
    )
