"""The two files of `tuningfork data`: earlier ones of its own are replaced, foreign ones never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.summary.workbench import pair, summary_of
from tuningfork.data.summary.records import DataSummary
from tuningfork.errors import RunFolderError
from tuningfork.report.dataset.report_files import PAGE, REPORT, check_report_folder, write


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> DataSummary:
    folder = tmp_path_factory.mktemp("rows")
    return summary_of(folder, [pair("one", "ab", "cde"), pair("two", "fgh", "ij")])


def test_an_earlier_report_is_replaced(tmp_path: Path, summary: DataSummary) -> None:
    folder = tmp_path / "run" / "data"
    check_report_folder(folder)
    assert not folder.exists()
    assert write(folder, summary, "1.0") == [folder / REPORT, folder / PAGE]
    assert json.loads((folder / REPORT).read_text()) == {
        **{"made_by": "tuningfork data", "version": "1.0"},
        **summary.as_dict(),
    }
    write(folder, summary, "1.1")
    assert json.loads((folder / REPORT).read_text())["version"] == "1.1"
    assert "tuningfork data 1.1" in (folder / PAGE).read_text()
    assert sorted(path.name for path in folder.iterdir()) == [PAGE, REPORT]


@pytest.mark.parametrize("name", [REPORT, PAGE])
@pytest.mark.parametrize("theirs", ['{"rows_read": 3}', "my notes on what tuningfork data said", ""])
def test_what_somebody_else_made_stays(tmp_path: Path, summary: DataSummary, name: str, theirs: str) -> None:
    """The account that a run writes has the same name as the report."""
    write(tmp_path, summary, "1.0")
    (tmp_path / name).write_text(theirs)
    other = PAGE if name == REPORT else REPORT
    before = (tmp_path / other).read_bytes()
    with pytest.raises(RunFolderError, match=rf"{name} exists and was not made by `tuningfork data`.*Move it away"):
        write(tmp_path, summary, "1.1")
    assert (tmp_path / name).read_text() == theirs
    assert (tmp_path / other).read_bytes() == before
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(RunFolderError, match=name):
        check_report_folder(tmp_path)


@pytest.mark.parametrize("name", [REPORT, PAGE, ""])
def test_an_earlier_report_behind_a_link_stays(tmp_path: Path, summary: DataSummary, name: str) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write(elsewhere, summary, "1.0")
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    if name:
        folder.mkdir()
    (folder / name).symlink_to(elsewhere / name)
    with pytest.raises(RunFolderError, match=rf"{name or 'data'} is a link.*Remove it"):
        write(folder, summary, "1.1")
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_what_a_kill_left_of_a_report_is_cleared_away(tmp_path: Path, summary: DataSummary) -> None:
    for name in (f".{PAGE}.tuningfork-{'0' * 16}.partial", "notes.partial"):
        (tmp_path / name).touch()
    write(tmp_path, summary, "1.0")
    assert sorted(path.name for path in tmp_path.iterdir()) == [PAGE, REPORT, "notes.partial"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match=r"run is a file.*Choose another output\.dir"):
        check_report_folder(tmp_path / "run" / "data")
