"""`tuningfork check-cluster`: whether the processes of a run would work well together, before minutes are paid for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tuningfork.commands.inputs import shared_folders
from tuningfork.distributed.measure import measured
from tuningfork.distributed.preflight import Report, findings, links, medians
from tuningfork.distributed.world import world
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Console, number, table
from tuningfork.train.setup.device import choose_device


def check_cluster(config: RunConfig, console: Console | None = None) -> int:
    """`tuningfork check-cluster`: what the processes of a run have, and can do together; 1 if something is wrong."""
    console = console or Console()
    with world(config.parallel, choose_device(config.train.device).type == "cuda") as ranks:
        folders = {setting: (folder, True) for setting, folder in shared_folders(config).items()}
        if config.data.cache is not None:
            folders["data.cache"] = (config.data.cache, False)
        with console.stage("cluster", f"measuring {ranks.size} process{'es' * (ranks.size > 1)}"):
            reports = measured(ranks, choose_device(config.train.device), folders, config.model.path)
    found = findings(reports)
    console.print("", *cluster_table(reports).split("\n"), "")
    console.print(*(f"! {line}" for line in found or ()))
    if not found:
        console.print("nothing is wrong")
    return 1 if found else 0


def cluster_table(reports: Sequence[Report]) -> str:
    """What was found, as text of several lines: a row a process, then what they share."""
    rows: list[tuple[str, ...]] = [("rank", "host", "device", "clock", "TFLOP/s", "GB/s from rank before")]
    for report in reports:
        link = "-" if report.link is None else number(report.link / 1e9)
        clock = f"{report.clock:+.3f} s"
        rows.append((str(report.rank), report.host, report.device, clock, number(report.compute / 1e12), link))
    empty = ("",) * 3
    for kind, rate in medians(links(reports)).items():
        rows.append((f"median link {kind}", *empty, "", number(rate / 1e9)))
    for name in reports[0].collectives:
        rate = median(report.collectives[name] for report in reports)
        rows.append((f"{name}, GB/s a process", *empty, "", number(rate / 1e9)))
    for setting, folder in reports[0].folders.items():
        written = "" if folder.written is None else f"{number(folder.written / 1e9)} written"
        rows.append((setting, *empty, f"{folder.free / 2**30:,.0f} GiB free", written))
    for name, value in reports[0].versions.items():
        rows.append((name, *empty, "", value))
    return table("cluster", rows)
