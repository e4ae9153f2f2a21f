"""The files of `tuningfork eval`: an earlier one of its own is replaced, a foreign one never, and none through a
link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuningfork.errors import RunFolderError
from tuningfork.report.run.eval_files import check_eval_folder, write

SAID, FACTS, SCORES = "model on held_out", {"policy": "a"}, {"loss": 0.5}


def test_an_evaluation_of_the_same_facts_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "evaluations"
    check_eval_folder(folder)
    path = write(folder, SAID, FACTS, SCORES, {"seconds": 1})
    assert write(folder, SAID, FACTS, SCORES, {"seconds": 2}) == path
    assert json.loads(path.read_text()) == {"made_by": "tuningfork eval", "scores": SCORES, **FACTS, "seconds": 2}
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("theirs", ["{}", "my notes on what tuningfork eval said", '{"text": "tuningfork eval"}', ""])
def test_what_somebody_else_made_stays(tmp_path: Path, theirs: str) -> None:
    path = write(tmp_path, SAID, FACTS, SCORES, {})
    path.write_text(theirs)
    with pytest.raises(RunFolderError, match=r"exists and was not made by `tuningfork eval`.*Move it away"):
        write(tmp_path, SAID, FACTS, SCORES, {})
    assert path.read_text() == theirs


@pytest.mark.parametrize("linked", ["folder", "file", "folder to nothing"])
def test_nothing_is_written_through_a_link(tmp_path: Path, linked: str) -> None:
    folder, elsewhere = tmp_path / "evaluations", tmp_path / "elsewhere"
    before = write(elsewhere, SAID, FACTS, SCORES, {"seconds": 1})
    text = before.read_text()
    if linked == "file":
        folder.mkdir()
        (folder / before.name).symlink_to(before)
    else:
        folder.symlink_to(elsewhere if linked == "folder" else tmp_path / "absent")
        with pytest.raises(RunFolderError, match=r"evaluations is a link.*Remove it"):
            check_eval_folder(folder)
    with pytest.raises(RunFolderError, match=r"is a link.*Remove it"):
        write(folder, SAID, FACTS, SCORES, {"seconds": 2})
    assert before.read_text() == text and list(elsewhere.iterdir()) == [before]
    assert not (tmp_path / "absent").exists()
