"""Files and folders that are whole or absent, and folders that one process holds."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bounds import within
from tuningfork.errors import RunFolderError
from tuningfork.files import (
    DIGESTS,
    Hashed,
    NotAFile,
    append_plain,
    check_plain,
    check_sealed,
    checksum,
    clear_abandoned,
    exclusive,
    is_aside,
    opened,
    read_plain,
    remove,
    seal,
    whole_file,
    whole_folder,
)

REST = "tuningfork-0123456789abcdef.partial"  # how names end that only we give


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


def test_an_empty_folder_is_removed_by_whoever_made_it(tmp_path: Path) -> None:
    """A user may have given it rights of its own."""
    (tmp_path / "theirs").mkdir()
    for name in ("theirs", "ours"):
        with exclusive(tmp_path / name):
            assert (tmp_path / name).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


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


def test_a_folder_is_removed_and_what_its_links_lead_to_stays(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        (place / "file").touch()
    (folder / "link").symlink_to(elsewhere)
    remove(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"] and (elsewhere / "file").exists()


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


def test_digests_never_lead_out_of_their_folder(tmp_path: Path) -> None:
    """A stranger's digests.json could name a file that never ends, or that tells something."""
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    for name in ("../secret", str(secret), "..", ""):
        (folder / DIGESTS).write_text(json.dumps({name: checksum(secret)}))
        with pytest.raises(ValueError, match=r"digests\.json is damaged"):
            check_sealed(folder)


# --- links and other things that are no files -------------------------------------------------------------------------


def put(kind: str, path: Path, elsewhere: Path) -> None:
    """Something at `path` that is no plain file; `elsewhere` is a file that a link leads to."""
    elsewhere.write_text("precious")
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "link to nothing":
        path.symlink_to(elsewhere.with_name("absent"))
    elif kind == "link to a folder":
        path.symlink_to(elsewhere.parent)
    elif kind == "hard link":
        path.hardlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)  # the name of a socket must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "folder":
        path.mkdir()


LINKS = ("link", "link to nothing", "link to a folder")
KINDS = (*LINKS, "pipe", "socket", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_neither_written_nor_read(kind: str, tmp_path: Path) -> None:
    """A pipe would wait for its other end for ever; a link would have us write to whatever file it leads to."""
    path, elsewhere = tmp_path / "log.txt", tmp_path / "elsewhere"
    put(kind, path, elsewhere)
    there = "a link" if kind in LINKS else f"a {kind}" if kind != "pipe" else "a named pipe"
    for use in (append_plain, read_plain, check_plain, lambda path: whole_file(path).__enter__()):
        with pytest.raises(RunFolderError, match=rf"log\.txt is {there}.*(Remove it|Move it away)"):
            use(path)
    assert elsewhere.read_text() == "precious" and not (tmp_path / "absent").exists()
    assert os.path.lexists(path) and len(list(tmp_path.iterdir())) == 2


def test_a_file_with_a_second_name_is_replaced_and_read_but_never_appended_to(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "log.txt", tmp_path / "elsewhere"
    put("hard link", path, elsewhere)
    check_plain(path)
    assert read_plain(path) == b"precious"
    for use in (append_plain, lambda path: check_plain(path, writes=True)):
        with pytest.raises(RunFolderError, match=r"log\.txt is a file with 2 names \(hard links\).*Put a copy"):
            use(path)
    with whole_file(path) as file:
        file.write(b"new")
    assert elsewhere.read_text() == "precious" and path.read_text() == "new"
    with append_plain(path) as text:
        text.write("er")
    assert path.read_text() == "newer"


@pytest.mark.parametrize("kind", [*LINKS, "pipe"])
def test_a_link_that_comes_at_the_last_moment_is_not_followed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a name and its opening."""
    path, elsewhere = tmp_path / "log.txt", tmp_path / "elsewhere"
    put(kind, path, elsewhere)

    def nothing_yet(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "lstat", nothing_yet)
    with pytest.raises((RunFolderError, OSError), match=r"named pipe|symbolic links|No such device"):
        append_plain(path)
    assert elsewhere.read_text() == "precious" and not (tmp_path / "absent").exists()


def test_the_folders_above_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with whole_file(tmp_path / "runs" / "first" / "file") as file:
        file.write(b"content")
    with append_plain(tmp_path / "runs" / "first" / "file") as text:
        text.write("s")
    assert (tmp_path / "disk" / "first" / "file").read_text() == "contents"
    with exclusive(tmp_path / "runs"), whole_folder(tmp_path / "runs" / "second"):
        pass
    assert (tmp_path / "disk" / "second").is_dir()


# --- what is not whole yet --------------------------------------------------------------------------------------------


def test_what_is_not_whole_bears_a_name_that_only_we_give(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a\nb.json"), whole_folder(tmp_path / "step-1"):
        names = [path.name for path in tmp_path.iterdir()]
        assert len(names) == 2 and all(map(is_aside, names))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a\nb.json", "step-1"]
    for name in (".partial", "model.partial", "rows.1234abcd.bin.partial", f"model.{REST}", f".{REST}", "config.yaml"):
        assert not is_aside(name)
    assert is_aside(f".config.yaml.{REST}") and not is_aside(f".config.yaml.{REST}~")


@pytest.mark.parametrize("held", [False, True])
def test_only_what_a_kill_left_behind_is_cleared_away(held: bool, tmp_path: Path) -> None:
    """A folder that nobody holds for himself has our files alone, and they are locked while they are written."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    strange = ["notes.partial", "step-3.partial", "rows.1234abcd.bin.partial", f"model.{REST}", "config.yaml"]
    for name in ("folder", "elsewhere", *(f"folder/{name}" for name in ("model.partial", f".step-1.{REST}"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("precious")
    for name in (*strange, f".config.yaml.{REST}", f".a\nb.{REST}", f".locked.{REST}"):
        (folder / name).write_text("")
    (folder / f".link.{REST}").symlink_to(elsewhere)
    os.mkfifo(folder / f".pipe.{REST}")
    with (folder / f".locked.{REST}").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        clear_abandoned(folder, held)
    ours = set() if held else {f".step-1.{REST}", f".locked.{REST}"}
    kept = {*strange, *ours, "file", "model.partial", f".link.{REST}", f".pipe.{REST}"}
    assert {path.name for path in folder.iterdir()} == kept
    assert (elsewhere / "file").read_text() == (folder / "model.partial" / "file").read_text() == "precious"
    clear_abandoned(folder / "file", held)
    clear_abandoned(folder / "absent", held)


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_and_folders_have_the_mode_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    """Also those of libraries, some of which keep what they write to its owner, or open it to all."""
    with whole_file(tmp_path / "runs" / "file") as file:
        file.write(b"content")
    with append_plain(tmp_path / "runs" / "log.txt"):
        pass
    with whole_folder(tmp_path / "runs" / "model") as aside:
        (aside / "below").mkdir()
        for name, mode in (("weights", 0o600), ("config", 0o644), ("below/all", 0o666)):
            (aside / name).touch()
            (aside / name).chmod(mode)
    found = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    folders = {path for path in found if (tmp_path / path).is_dir()}
    assert len(folders) == 3 and len(found) == 8
    assert found == {path: (0o777 if path in folders else 0o666) & ~umask for path in found}


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


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    """A file of holes takes no disk, and all memory."""
    path = tmp_path / "small.json"
    path.write_bytes(b"12345")
    assert read_plain(path, largest=5) == b"12345"
    with pytest.raises(RunFolderError, match=r"small\.json has more than 4 bytes.*Put back"):
        read_plain(path, largest=4)
    os.truncate(path, 100 << 30)
    with pytest.raises(RunFolderError, match=r"small\.json has more than 67,108,864 bytes"):
        read_plain(path)
