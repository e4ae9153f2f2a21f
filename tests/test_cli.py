"""The command line as a process among others: what it says, and how it ends when nobody listens."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tuningfork
from tuningfork.cli import main

ROOT = Path(tuningfork.__file__).parents[1]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_a_reader_that_leaves_ends_the_command_quietly(arguments):
    """`tuningfork train --help | head -1`; here the reader has left before the first word."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tuningfork.cli", *arguments]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # as usual: what is said last is written when Python ends
    done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("command", "own"), [("data", ["--strict"]), ("train", ["--resume"]), ("reference", []), ("eval", ["--policy"])]
)
def test_help_of_a_command_shows_all_that_it_takes(command, own, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    shown = [line.split() for line in capsys.readouterr().out.partition("Settings of a run")[0].splitlines()]
    assert shown[0][:4] == ["usage:", "tuningfork", command, "[recipe]"]
    assert [words[0] for words in shown[1:] if words] == ["recipe", *own]


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EACCES, "Permission denied"), (errno.EIO, "Input/output error"), (errno.ELOOP, "Too many levels")],
)
def test_what_the_machine_refuses_is_said_with_the_files_name(monkeypatch, capsys, number, said):
    """Also where nobody foresaw it."""

    def refusing(*_, **__):
        raise OSError(number, os.strerror(number), "some\x1b[31m/file")

    monkeypatch.setattr("tuningfork.config.load_run_config", refusing)
    assert main(["data", "recipe.yaml"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("tuningfork: some") and "\x1b" not in message
    assert f"/file cannot be used: {said}" in message


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def failing(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "file")

    monkeypatch.setattr("tuningfork.config.load_run_config", failing)
    with pytest.raises(FileNotFoundError):
        main(["data", "recipe.yaml"])
