"""What is found before a run on several processes: what is judged, and that what is measured is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.worlds import together
from tuningfork.commands.check_cluster import cluster_table
from tuningfork.distributed import measure, shared
from tuningfork.distributed.measure import measured
from tuningfork.distributed.preflight import BETWEEN, WITHIN, Folder, Report, findings, links, medians
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks

GB = 1e9


def cluster(nodes: int = 2, per_node: int = 4) -> list[Report]:
    """Machines on which nothing is wrong."""
    return [
        Report(
            rank=rank,
            host=f"node{rank // per_node}",
            node=rank // per_node,
            device="card",
            versions={"PyTorch": "2.11", "its driver": "580"},
            clock=0.01 * rank,
            folders={
                "output.dir": Folder("/shared/runs", shared=True, free=1 << 40),
                "data.cache": Folder("/local", shared=False, sees_first=rank < per_node, free=1 << 40),
            },
            compute=700e12 + rank * 1e12,
            link=(40 if rank % per_node == 0 else 300) * GB,
        )
        for rank in range(nodes * per_node)
    ]


def but(rank: int, **changes: object) -> list[Report]:
    """The same with something else on one rank."""
    reports = cluster()
    reports[rank] = replace(reports[rank], **changes)  # type: ignore[arg-type]
    return reports


def folder(**changes: object) -> dict[str, Folder]:
    there = dict(cluster()[0].folders)
    return there | {"output.dir": replace(there["output.dir"], **changes)}  # type: ignore[arg-type]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert findings(cluster()) == [] and findings(cluster(1, 1)) == []


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        (lambda: but(5, versions={"PyTorch": "2.12", "its driver": "580"}), ["PyTorch", "2.12 on node1 (rank 5)"]),
        (lambda: but(5, versions={"PyTorch": "2.11"}), ["its driver", "none on node1 (rank 5)"]),
        (
            lambda: [replace(r, clock=r.clock - 60 * r.node) for r in cluster()],
            ["the clock of node1 is 59.9 s behind that of node0", "NTP"],
        ),
        (
            lambda: but(6, folders=folder(refused="Permission denied")),
            ["output.dir", "cannot be written by node1 (rank 6): Permission denied"],
        ),
        (
            lambda: [replace(r, folders=folder(sees_first=r.node == 0)) for r in cluster()],
            ["output.dir", "rank 0 (node0)", "not seen by node1 (ranks 4, 5, 6, 7)", "that they share"],
        ),
        (lambda: but(2, folders=folder(free=5 << 20)), ["output.dir", "5 MiB free on node0 (rank 2)"]),
        (lambda: but(2, link=140 * GB), ["from rank 1 (node0) to rank 2 (node0)", "140 GB/s", "300 GB/s", WITHIN]),
        (lambda: but(3, compute=500e12), ["rank 3 (node0) computes 500 TFLOP/s, where 703 are usual"]),
    ],
)
def test_what_is_wrong_is_named_once(reports: Callable[[], list[Report]], words: list[str]) -> None:
    [said] = findings(reports())
    assert all(word in said for word in words), said


def test_links_between_machines_are_compared_with_each_other() -> None:
    """Two are too few to tell which is the slow one, unless one is less than a third of the other."""
    reports = cluster(nodes=4)
    assert medians(links(reports)) == {WITHIN: 300 * GB, BETWEEN: 40 * GB}
    reports[4] = replace(reports[4], link=19 * GB)
    [said] = findings(reports)
    assert "from rank 3 (node0) to rank 4 (node1)" in said and BETWEEN in said
    assert links(cluster(1, 1)[:1])[0].kind == WITHIN
    assert links([replace(cluster(1, 1)[0], link=None)]) == []


def test_what_is_slow_but_not_too_slow_is_let_be() -> None:
    assert findings(but(2, link=151 * GB)) == findings(but(3, compute=0.81 * 703e12)) == []


def _measure(ranks: Ranks, folder: Path, blind: bool) -> tuple[list[Report], int]:
    shared.PATIENCE = 0.2
    if blind and ranks.rank:  # as on a machine with a folder of its own by that name
        (folder / "own").mkdir()
        os.chdir(folder / "own")
    else:
        os.chdir(folder)
    reports = measured(ranks, torch.device("cpu"), {"output.dir": ("runs/first", True)}, str(folder))
    return reports, len(list(folder.rglob(".tuningfork*")))


@pytest.mark.parametrize("blind", [False, True])
def test_each_process_measures_and_all_know(blind: bool, tmp_path: Path) -> None:
    (reports, left), (others, _) = together(2, _measure, tmp_path, blind)
    assert reports == others and left == 0
    assert [report.rank for report in reports] == [0, 1] and {report.node for report in reports} == {0}
    for report in reports:
        assert report.compute > 0 and report.link is not None and report.link > 0 and abs(report.clock) < 30
        assert all(rate > 0 for rate in report.collectives.values()) and len(report.collectives) == 6
        there = report.folders["output.dir"]
        assert there.refused is None and there.free > 0 and (there.written is None) == (report.rank == 1)
    assert [report.folders["output.dir"].sees_first for report in reports] == [True, not blind]
    assert not (tmp_path / "runs").exists()
    assert "median link within a machine" in cluster_table(reports)
    assert any("not seen by" in line for line in findings(reports)) == blind


def test_a_model_from_nothing_has_no_files_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least of all those of the current folder, which may be another one on each machine."""
    monkeypatch.chdir(tmp_path)
    versions = [measure._versions(torch.device("cpu"), model) for model in ("", ".")]
    assert ["model.path" in found for found in versions] == [False, True]


def _ring(ranks: Ranks) -> list[float | None]:
    return [report.link for report in measured(ranks, torch.device("cpu"), {}, "owner/name")]


def test_an_odd_ring_is_closed() -> None:
    assert all(link is not None and 0 < link < float("inf") for found in together(3, _ring) for link in found)


def test_a_folder_that_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one process is all there is, and the user is one whom nothing refuses."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    [report] = measured(ONE_PROCESS, torch.device("cpu"), {"output.dir": (str(tmp_path), True)}, str(tmp_path))
    assert report.link is None and report.collectives == {}
    assert [line for line in findings([report]) if "cannot be written" in line and "Permission denied" in line]
    assert not any("not seen" in line for line in findings([report]))
