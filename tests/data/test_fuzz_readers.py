"""A short run of the fuzz program, always the same; and that it would find something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import fuzz_readers
from tuningfork.errors import DataError


def test_damaged_files_are_used_or_refused_by_name(tmp_path: Path) -> None:
    ran, found = fuzz_readers.fuzz(tmp_path, seed=0, cases=120)
    assert ran == 120 and not found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [KeyError("chosen"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "x"), DataError("bad")]
)
def test_a_fault_is_found_once_and_its_input_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def prepare(*_: Any) -> None:
        raise error

    monkeypatch.setattr(fuzz_readers, "prepare_examples", prepare)
    ran, (finding,) = fuzz_readers.fuzz(tmp_path, seed=0, cases=3)
    assert ran == 3 and finding.case == 0 and list(tmp_path.iterdir()) == [finding.file]
    (folder := tmp_path / "again").mkdir()
    again, _, _ = fuzz_readers.file_of(finding.case, 0, folder)
    assert again.read_bytes() == finding.file.read_bytes()
