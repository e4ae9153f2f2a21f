"""Measures what preflight.py judges: every process looks at its machine, and all of them at what lies between."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from tuningfork.distributed.alike import versions
from tuningfork.distributed.preflight import Folder, Report
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.shared import refusal, seen

SECONDS = 0.3  # at least, of each thing that is timed
WRITTEN = 64 << 20  # bytes that are written to time a disk
SENT = {"cpu": 4 << 20, "cuda": 64 << 20}  # bytes from one process to the next
SUMMED = {"cpu": (1 << 16, 1 << 20, 1 << 23), "cuda": (1 << 20, 1 << 24, 1 << 28)}  # bytes of each process's part
SIDE = {"cpu": 512, "cuda": 8192}  # of the square matrices that are multiplied
ASKED = 5  # times that clocks are compared


def measured(ranks: Ranks, device: torch.device, folders: Mapping[str, tuple[str, bool]], model: str) -> list[Report]:
    """What each process found, in their order. All must ask for it.

    Args:
        folders: setting -> its folder, which need not exist, and whether all processes must see one there.
        model: the folder of the model, whose files should be the same everywhere, or a name on the hub.
    """
    firsts = ranks.all(ranks.on_node == 0)
    report = Report(
        rank=ranks.rank,
        host=socket.gethostname(),
        node=sum(firsts[: ranks.rank + 1]) - 1,  # a launcher numbers machine by machine
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        versions=_versions(device, model),
        clock=_clock(ranks),
        folders={setting: _folder(ranks, Path(path), shared) for setting, (path, shared) in folders.items()},
        compute=_compute(ranks, device),
        link=_link(ranks, device),
        collectives=_collectives(ranks, device),
    )
    return ranks.all(report)


def _versions(device: torch.device, model: str) -> dict[str, str]:
    """What decides numbers, and should be the same on all processes."""
    found = versions()
    if model:  # a model from nothing has no folder yet
        found["model.path"] = _files(Path(model))
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
        found["the GPU"] = torch.cuda.get_device_name(device)
        found["its driver"] = _driver()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _files(folder: Path) -> str:
    """Names and sizes of a folder's files in a few characters; a name on the hub is the same everywhere."""
    if not folder.is_dir():
        return "no folder"
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return f"{len(files)} files {hashlib.sha256(repr(files).encode()).hexdigest()[:8]}"


def _driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "unknown")


def _clock(ranks: Ranks) -> float:
    """Seconds that this process's clock is ahead of the first one's: all look at theirs right after they have met."""
    ahead = []
    for _ in range(ASKED):
        ranks.barrier()
        now = ranks.all(time.time())
        ahead.append(now[ranks.rank] - now[0])
    return median(ahead)


def _folder(ranks: Ranks, wanted: Path, shared: bool) -> Folder:
    """Whether a folder takes files, here and for all. Nothing stays there, and it is not made."""
    path, refused, sees_first = seen(ranks, wanted)
    own = path / f".tuningfork-check-{uuid.uuid4().hex}"
    written: list[float] = []
    size = 1 if ranks.on_node else WRITTEN
    refused = refused or refusal(lambda: written.append(_write(own, size)))
    rate = written[0] if written and not ranks.on_node else None
    return Folder(str(path), shared, refused, sees_first, shutil.disk_usage(path).free, rate)


def _write(path: Path, size: int) -> float:
    """Bytes a second that a new file takes, until they are on the disk. The file is removed."""
    content = os.urandom(size)  # which no file system makes smaller
    try:
        begun = time.perf_counter()
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)


def _compute(ranks: Ranks, device: torch.device) -> float:
    """Floating-point operations a second of a square product, while all compute: so they share power and memory as in
    a run."""
    side = SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    ranks.barrier()
    return 2 * side**3 / _seconds(device, lambda: left @ right)


def _seconds(device: torch.device, act: Callable[[], object]) -> float:
    """Seconds that something takes, the median of as many as fit in SECONDS."""
    act()
    _wait(device)
    taken: list[float] = []
    while sum(taken) < SECONDS or len(taken) < 3:
        begun = time.perf_counter()
        act()
        _wait(device)
        taken.append(time.perf_counter() - begun)
    return median(taken)


def _seconds_together(ranks: Ranks, device: torch.device, act: Callable[[], object], times: int = 5) -> float:
    """The same of what several do together, so a fixed number of times; none of them begins before all are there."""
    taken = []
    for _ in range(times + 1):  # the first sets up the connection
        ranks.barrier()
        begun = time.perf_counter()
        act()
        _wait(device)
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _link(ranks: Ranks, device: torch.device) -> float | None:
    """Bytes a second from the rank before this one. Every second link is timed at once, so that each process sends or
    receives, and a slow link slows no other's time."""
    if ranks.size == 1:
        return None
    block = torch.ones(SENT[device.type], dtype=torch.uint8, device=device)
    odd = ranks.size % 2
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    seconds = 0.0
    for turn in range(2 + odd):
        sources = [ranks.size - 1] if turn == 2 else range(turn, ranks.size - odd, 2)
        if ranks.rank in sources:
            _seconds_together(ranks, device, lambda: dist.send(block, after))
        elif before in sources:
            seconds = _seconds_together(ranks, device, lambda: dist.recv(block, before))
        else:
            _seconds_together(ranks, device, lambda: None)
    return len(block) / seconds


def _collectives(ranks: Ranks, device: torch.device) -> dict[str, float]:
    """Bytes a second that each process sends, and receives, in what a step does together. Of n parts of one size, an
    all-gather moves (n - 1), and an all-reduce, which is two of these over parts of 1/n, 2 (n - 1) / n: the "bus
    bandwidth" of nccl-tests, doc/PERFORMANCE.md there."""
    if ranks.size == 1:
        return {}
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
    rates = {}
    for size in SUMMED[device.type]:
        part = torch.ones(size // 4, device=device)
        seconds = _seconds_together(ranks, device, partial(dist.all_reduce, part))
        rates[f"all-reduce {_size(size)}"] = 2 * size * (ranks.size - 1) / ranks.size / seconds
        own = part[: max(1, len(part) // ranks.size)]
        whole = torch.empty(len(own) * ranks.size, device=device)
        seconds = _seconds_together(ranks, device, partial(gather, whole, own))
        rates[f"all-gather {_size(size)}"] = 4 * len(own) * (ranks.size - 1) / seconds
    return rates


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
