"""Where `tuningfork data` writes: two files in a folder of their own inside the run folder, never over foreign ones."""

from __future__ import annotations

from pathlib import Path

from tuningfork.data.summary.records import DataSummary
from tuningfork.files import clear_abandoned
from tuningfork.report.dataset.page import draw_page
from tuningfork.report.files import check_file, check_folder, write_json, write_text

FOLDER = "data"  # inside output.dir; a run may begin where there is nothing else
REPORT, PAGE = "data_report.json", "data_report.html"
MADE_BY = "tuningfork data"
_OURS = {REPORT: f'"made_by": "{MADE_BY}"', PAGE: f'<meta name="generator" content="{MADE_BY} '}  # and in no other file


def check_report_folder(folder: Path) -> None:
    """Look whether a report may be written into a folder, before minutes are spent on it.

    Raises:
        RunFolderError: one of the files exists and is not an earlier report, no folder can be there, or a link is.
    """
    check_folder(folder)
    for name, mark in _OURS.items():
        check_file(folder / name, MADE_BY, mark)


def write(folder: Path, summary: DataSummary, version: str) -> list[Path]:
    """Write the report and its page, each as a whole, in place of earlier ones; returns their paths.

    Raises:
        RunFolderError: a file there is not an earlier report, or the disk refuses.
    """
    check_report_folder(folder)
    clear_abandoned(folder)
    write_json(folder / REPORT, {"made_by": MADE_BY, "version": version, **summary.as_dict()})
    write_text(folder / PAGE, draw_page(summary, f"{MADE_BY} {version}"))
    return [folder / REPORT, folder / PAGE]
