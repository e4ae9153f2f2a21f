"""Files of a run folder that are whole or absent, and fit to be looked at."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from tuningfork.errors import NonFiniteError, RunFolderError
from tuningfork.report.files import write_json, write_text


def test_json_is_readable_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "summary.json"
    value = {"text": "ü\n", "lone": "\udc80", "number": 1 / 3, "none": None}
    write_json(path, value)
    assert json.loads(path.read_text()) == value
    assert '"ü\\n"' in path.read_text() and path.read_text().endswith("}\n")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_say_is_refused_before_it_is_written(tmp_path: Path, value: float) -> None:
    with pytest.raises(NonFiniteError, match="nan or infinite"):
        write_json(tmp_path / "summary.json", {"a": [value]})
    assert not (tmp_path / "summary.json").exists()


def test_a_write_that_fails_leaves_the_old_file_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunFolderError) as caught:
        write_text(path, "new")
    assert str(caught.value) == (
        f"{path} cannot be written: No space left on device. "
        "Make room or permit it, then give the command again, with --resume if the run had begun; or choose "
        "another folder."
    )
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "old")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_text(path, "new")
    assert path.read_text() == "old"
    write_text(path, "newer")  # over what the crash left beside it
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_json_holds_what_it_was_given_and_nothing_that_a_terminal_would_obey(tmp_path: Path) -> None:
    value = {f"key{chr(code)}": chr(code) for code in (*range(0xA0), 0x61C, *range(0x2000, 0x2070), 0x1F600)}
    write_json(tmp_path / "file.json", value)
    text = (tmp_path / "file.json").read_text(encoding="utf-8")
    assert json.loads(text) == value and "\U0001f600" in text
    assert not set(text) & {
        chr(code) for code in (*range(10), *range(11, 32), *range(0x7F, 0xA0), 0x61C, 0x2028, 0x202E)
    }
    assert not set(text) & set("\u200e\u200f\u2029\u202a\u202b\u202c\u202d\u2066\u2067\u2068\u2069")
