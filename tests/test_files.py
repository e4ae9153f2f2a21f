"""Files and folders that are whole or absent, and folders that one process holds."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from tests.bounds import within
from tuningfork.errors import RunFolderError
from tuningfork.files import DIGESTS, Hashed, NotAFile, check_sealed, checksum, exclusive, opened, remove, seal


def test_a_folder_that_its_holder_removed_is_made_anew_for_the_next(tmp_path: Path) -> None:
    """What a process has waited for may be a folder that has no name any more: nobody else would see its lock."""
    folder, waiting, go = tmp_path / "held", threading.Event(), threading.Event()
    seen: list[bool] = []

    def wait_for_it() -> None:
        with exclusive(folder, waiting.set):
            seen.append(folder.is_dir())
            go.wait(60)

    thread = threading.Thread(target=wait_for_it)
    with exclusive(folder):
        thread.start()
        assert waiting.wait(60)
        with pytest.raises(RunFolderError, match="is in use"), exclusive(folder):
            pass
    # It was empty, so it is removed as it is let go; the thread now holds another one.
    while not seen:
        assert thread.is_alive()
    with pytest.raises(RunFolderError, match="is in use"), exclusive(folder):
        pass
    go.set()
    thread.join(60)
    assert seen == [True] and not folder.exists()


def test_a_folder_that_cannot_be_made_names_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(RunFolderError, match=r"file is not a folder. Do this\.")
    with refused, exclusive(tmp_path / "file", cure="Do this."):
        pass


@pytest.mark.parametrize("damage", ["content", "gone", "no digests", "other digests", "empty digests", "no JSON"])
def test_a_sealed_folder_shows_any_damage(damage: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    seal(tmp_path)
    (tmp_path / "c").touch()
    check_sealed(tmp_path, ("a", "b"))
    if damage == "content":
        (tmp_path / "b").write_text("c")
    elif damage == "gone":
        (tmp_path / "b").unlink()
    elif damage == "no digests":
        (tmp_path / DIGESTS).unlink()
    else:
        (tmp_path / DIGESTS).write_text({"other": "[]", "empty": "{}"}.get(damage.split()[0], '{"a": '))
    with pytest.raises((ValueError, FileNotFoundError)):
        check_sealed(tmp_path, ("a", "b"))


def test_files_folders_and_links_are_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    assert (tmp_path / "folder" / "file").exists()
    for name in ("folder", "file"):
        remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_hashed_file_says_what_its_content_would(tmp_path: Path) -> None:
    with Hashed((tmp_path / "file").open("wb")) as file:
        for part in (b"one", bytearray(b"two"), memoryview(b"three"), b""):
            file.write(part)
        assert file.tell() == 11
    assert (tmp_path / "file").read_bytes() == b"onetwothree" and file.checksum() == checksum(tmp_path / "file")


def test_a_seal_reads_only_what_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "known").write_bytes(b"content")
    (tmp_path / "other").write_bytes(b"content")
    seal(tmp_path, {"known": "a checksum"})
    sealed = json.loads((tmp_path / DIGESTS).read_text())
    assert sealed == {"known": "a checksum", "other": checksum(tmp_path / "other")}


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device may have no end. A link to a file is one."""
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    with opened(tmp_path / "file") as file, opened(str(tmp_path / "link")) as same:
        assert file.read() == same.read() == b"content"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to a pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(tmp_path / "socket"))
        for name, what in (("pipe", "named pipe"), ("link to a pipe", "named pipe"), ("socket", "socket")):
            with pytest.raises(NotAFile, match=f"is a {what}, not a file"), within(20):
                opened(tmp_path / name)
    with pytest.raises(NotAFile, match="is a device, not a file"), within(20):
        opened("/dev/zero")
    with pytest.raises(IsADirectoryError):
        opened(tmp_path)
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "none")


def test_what_becomes_a_pipe_while_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    looked = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda path: looked)
    with pytest.raises(NotAFile), within(20):
        opened(tmp_path / "pipe")
