"""Where `tuningfork data` writes: two files in a folder of their own inside the run folder, never over foreign ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuningfork.errors import RunFolderError
from tuningfork.files import check_plain, clear_abandoned, explained, plain
from tuningfork.report.data_page import draw_page
from tuningfork.report.writer import write_json, write_text

FOLDER = "data"  # inside output.dir; a run may begin where there is nothing else
REPORT, PAGE = "data_report.json", "data_report.html"
MADE_BY = "tuningfork data"
_BEGINNING = 1000  # bytes, in which a report says what it is
_OURS = {REPORT: f'"made_by": "{MADE_BY}"', PAGE: f'<meta name="generator" content="{MADE_BY} '}  # and in no other file


def check(folder: Path) -> None:
    """Raise RunFolderError where one of the files exists and is not an earlier report, or where no folder can be.

    The folder itself, which lies in the run folder, must not be a link.
    """
    place = next((path for path in (folder, *folder.parents) if path.exists() or path.is_symlink()), None)
    if place is not None and not place.is_dir():
        raise RunFolderError(f"{place} is a file, so {folder} cannot be made. Choose another output.dir.")
    check_plain(folder, folder=True)
    for path in (folder / REPORT, folder / PAGE):
        check_plain(path)
        if path.exists() and not _is_ours(path):
            raise RunFolderError(
                f"{path} exists and was not made by `{MADE_BY}`, so it is not replaced. Move it away or choose another "
                "output.dir."
            )


def write(folder: Path, report: Mapping[str, Any], version: str) -> list[Path]:
    """Write the report and its page, each as a whole, in place of earlier ones; returns their paths.

    Raises RunFolderError as `check`, and where the disk refuses.
    """
    check(folder)
    clear_abandoned(folder)
    report = {"made_by": MADE_BY, "version": version, **report}
    write_json(folder / REPORT, report)
    write_text(folder / PAGE, draw_page(report))
    return [folder / REPORT, folder / PAGE]


def _is_ours(path: Path) -> bool:
    with explained(path), open(path, "rb", opener=plain) as file:
        return _OURS[path.name].encode() in file.read(_BEGINNING)
