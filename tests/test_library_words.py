"""What libraries log and warn of: a stranger's words in it are shown, and order a terminal nothing."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import tuningfork
from tests.models.hf.folders import edit, folder_of
from tuningfork.library_words import show_library_words

ROOT = Path(tuningfork.__file__).parents[1]
WORDS = "\x1b[31mred\x1b]0;title\x07\u202e\r\ntuningfork: done"
SHOWN = "⟨U+001B⟩[31mred⟨U+001B⟩]0;title⟨U+0007⟩⟨U+202E⟩⟨U+000D⟩↵tuningfork: done"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a library's own handler writes."""
    factory, shown, hook = logging.getLogRecordFactory(), warnings.showwarning, sys.excepthook
    logger, stream = logging.getLogger("somebodys.library"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "propagate", False)
    show_library_words()
    yield stream
    logger.removeHandler(handler)
    logging.setLogRecordFactory(factory)
    warnings.showwarning, sys.excepthook = shown, hook


def test_what_a_library_logs_is_shown(said: io.StringIO) -> None:
    logger = logging.getLogger("somebodys.library")
    logger.error(f"cannot set {WORDS}")
    logger.error("cannot set %s", WORDS)
    assert said.getvalue() == f"cannot set {SHOWN}\n" * 2


def test_so_is_the_error_that_it_logs(said: io.StringIO) -> None:
    try:
        raise ValueError(WORDS)
    except ValueError:
        logging.getLogger("somebodys.library").exception("failed")
    assert said.getvalue().startswith("failed\nTraceback (most recent call last):\n  File ")
    assert "⟨U+001B⟩[31mred" in said.getvalue()
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(said.getvalue())


def test_so_is_what_it_warns_of() -> None:
    program = (
        "import sys, warnings; from tuningfork.library_words import show_library_words; show_library_words();"
        "warnings.warn(sys.argv[1]); warnings.warn_explicit(DeprecationWarning(sys.argv[1]), None, 'library.py', 3)"
    )
    command = [sys.executable, "-W", "always", "-c", program, WORDS]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60)
    assert done.stderr.decode() == f"<string>:1: UserWarning: {SHOWN}\nlibrary.py:3: DeprecationWarning: {SHOWN}\n"


def test_so_is_an_error_that_nobody_foresaw() -> None:
    program = (
        "import sys; from tuningfork.library_words import show_library_words as s; s(); raise ValueError(sys.argv[1])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, WORDS], env=env, capture_output=True, timeout=60)
    said = done.stderr.decode()
    assert said.startswith("Traceback (most recent call last):\n") and "ValueError: ⟨U+001B⟩[31mred" in said
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(said)


def test_a_model_says_nothing_to_a_terminal_through_a_library(tmp_path: Path) -> None:
    """Even where a library is asked for all of its words. One process has all models, one after the other."""
    settings = ("use_return_dict", "hidden_size", "eos_token_id", "rope_parameters", "dtype", WORDS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    for number, setting in enumerate(settings):
        model = folder_of(tmp_path / f"model-{number}")
        edit(model / "config.json", **{setting: WORDS, "added": {"by a stranger": WORDS}})
    program = (
        "import sys; from tuningfork import cli\n"
        "for number in range(int(sys.argv[1])):\n"
        "    status = cli.main(['data', '--model.path', f'model-{number}', '--data.train', 'rows.jsonl'])\n"
        "    print(f'model {number}: status {status}', flush=True)"
    )
    command = [sys.executable, "-c", program, str(len(settings))]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "debug", "PYTHONWARNINGS": "always"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("model ")]
    assert refused == [f"model {number}: status 2" for number in range(len(settings))], said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
    assert not any(line.startswith("tuningfork: done") for line in said.splitlines())
