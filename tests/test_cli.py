"""The command line as a process among others: what it says, and how it ends when nobody listens."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

import tuningfork
from tests.repeated import slow
from tuningfork.cli import PATIENCE, main

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


def path_of(*folders: Path) -> str:
    """Where Python looks for packages: in these folders before those that are named already."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH", ""))))


@pytest.mark.parametrize("arguments", ["--help", "train --help", "--version", "data recipe.yaml"])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        (">&-", "the standard output is closed. Send it to a file, or to /dev/null."),
        ("> /dev/full", "the standard output cannot be written: No space left on device."),
    ],
)
def test_an_output_that_takes_nothing_is_said(arguments, where, said, tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {path: model}\ndata: {train: pairs.jsonl}\n")
    command = f"exec {sys.executable} -m tuningfork.cli {arguments} {where}"
    env = os.environ | {"PYTHONUNBUFFERED": "", "PYTHONPATH": path_of(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, timeout=90)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith(f"tuningfork: {said}\n") or arguments.startswith("data")


@pytest.mark.parametrize("encoding", ["ascii", slow("latin-1:strict"), slow("utf-8:strict")])
def test_an_output_of_another_encoding_says_what_it_can(encoding, tmp_path):
    """Names of files are in any alphabet, or in none."""
    run = tmp_path / "bücher 日本 \udcff"
    run.mkdir()
    (run / "config.yaml").write_text("model: {path: nowhere}\ndata: {eval: nothing.jsonl}\n")
    command = [sys.executable, "-m", "tuningfork", "eval", "--policy", str(run / "model")]
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": path_of(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert done.stdout.startswith(b"recipe: ") and b", of the run that the model is from\n" in done.stdout


INTERRUPTED = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in [name for name in sys.modules if name.split(".")[0] == sys.argv[1].split(".")[0] != "tuningfork"]:
    del sys.modules[name]
sys.meta_path.insert(0, Finder())
runpy.run_module("tuningfork", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module", ["tuningfork.cli", "argparse", "difflib", "tuningfork.report.run.console", "rich.live"]
)
def test_ctrl_c_while_the_program_starts_is_said_as_ever(module):
    command = [sys.executable, "-c", INTERRUPTED, module, "--version"]
    env = os.environ | {"PYTHONPATH": path_of(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tuningfork: interrupted\n")


def printed_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a help page of a terminal of 80 columns."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("data", ["--strict"]),
        ("train", ["--resume"]),
        ("reference", []),
        ("eval", ["--policy"]),
        ("check-cluster", []),
    ],
)
def test_help_of_a_command_shows_all_that_it_takes(command, own, capsys):
    lines = printed_help([command], capsys)
    assert lines[0].split()[:4] == ["usage:", "tuningfork", command, "[recipe]"]
    about = lines[1 : next(place for place, line in enumerate(lines) if "Settings of a run" in line)]
    named = [line.split()[0] for line in about if line and not line.startswith(" ")]
    assert named == ["recipe", *own]


def test_a_policy_without_a_name_is_no_folder(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--model.path", "m", "--data.eval", "e.jsonl", "--policy="])
    assert caught.value.code == 2
    assert "argument --policy: it is empty; name a model folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["data"], ["train"], ["reference"], ["eval"], ["check-cluster"]])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed_help(command, capsys)
    assert max(map(cell_len, lines)) <= 80
    if command:  # no line is broken where the source breaks it, which leaves short ones within a sentence
        meaning = next(place for place, line in enumerate(lines) if "What becomes of a longer example" in line)
        assert all(len(line.strip("│ ")) > 60 for line in lines[meaning : meaning + 2])


def test_help_shows_lists_and_mappings_of_a_recipe_as_they_may_stand_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {train: [a.jsonl, b.jsonl], shares: [1, 2], columns: {q: prompt}}\n")
    page = " ".join(line.strip("│ ") for line in printed_help(["data", str(recipe)], capsys))
    for shown in ("""'["a.jsonl", "b.jsonl"]'""", "'[1.0, 2.0]'", """'{"q": "prompt"}'"""):
        assert f"(recipe: {shown})" in page


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "tuningfork", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"tuningfork {tuningfork.__version__}\n"


@pytest.mark.parametrize(
    ("met", "launcher", "said"), [(False, True, ""), (False, False, "none.yaml"), (True, False, "none.yaml")]
)
def test_of_processes_that_fail_alike_the_first_says_why(met, launcher, said, capsys, monkeypatch):
    """The second waits for the launcher to end it, and speaks where none does, or where they had met."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: met)

    def wait(seconds: float) -> None:
        assert seconds == PATIENCE and not met
        if launcher:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", wait)
    assert main(["train", "none.yaml"]) == 2
    found = capsys.readouterr().err
    assert said in found and bool(said) == bool(found)


def test_the_first_of_a_machine_does_not_wait(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("nobody else says it"))
    assert main(["train", "none.yaml"]) == 2
    assert "none.yaml: there is no such recipe." in capsys.readouterr().err


@pytest.fixture
def without_libraries(tmp_path):
    """Runs the command line where heavy libraries say their name and end the process as soon as they are imported."""
    for library in ("torch", "transformers", "datasets", "pyarrow", "pandas"):
        (tmp_path / f"{library}.py").write_text(f"raise SystemExit('{library} is imported')\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        found = os.environ | {"PYTHONPATH": path_of(tmp_path, ROOT)}
        command = [sys.executable, "-m", "tuningfork", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "usage: tuningfork"),
        (["train", "--help"], 0, "--train.learning_rate"),
        (["trian", "recipe.yaml"], 2, "trian is no command; did you mean tuningfork train?"),
        (["something", "recipe.yaml"], 2, "invalid choice: 'something'"),
        (["train", "r.yaml", "train.learning_rate=1e-6"], 2, "Settings are given as --train.learning_rate 1e-6\n"),
        (["train", "train.seed=3"], 2, "train.seed=3 is no recipe. Settings are given as --train.seed 3\n"),
        (["data", "r.yaml", "other.yaml"], 2, "other.yaml is not expected here: a command takes one recipe."),
        (["train", "r.yaml", "--resume", "runs/a"], 2, "--resume takes no value, and runs/a is one: the run that goes"),
        (["train", "r.yaml", "--resume=runs/a"], 2, "recipe: tuningfork train runs/a/config.yaml --resume\n"),
        (["train", "none.yaml"], 2, "there is no such recipe"),
        (["train", "--model.path", "m", "--data.train", "d", "--train.sede", "1"], 2, "did you mean --train.seed?"),
        (["train", "--model.path", "m", "--data.train", "d", "--pack.tokens", "64"], 2, "Raise pack.tokens"),
        (["launch", "--help"], 0, "--max-restarts R"),
        (["launch", "train", "--help"], 0, "--train.learning_rate"),
        (["launch", "--processes", "0", "train", "r.yaml"], 2, "'0' is no whole number from 1 on"),
        (["launch", "--max-restarts", "-1", "train", "r.yaml"], 2, "'-1' is no whole number from 0 on"),
        (["launch", "data", "r.yaml"], 2, "invalid choice: 'data'"),
        (["launch", "train", "none.yaml"], 2, "there is no such recipe"),
    ],
)
def test_help_and_mistakes_in_a_recipe_wait_for_no_heavy_library(without_libraries, arguments, status, said):
    done = without_libraries(*arguments)
    assert (done.returncode, "is imported" in done.stderr) == (status, False)
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["data", "train", "reference", "eval", "check-cluster"])
def test_a_command_says_that_it_loads_libraries_before_it_does(without_libraries, command):
    done = without_libraries(command, "--model.path", "m", "--data.train", "d", "--data.eval", "e")
    assert done.stdout == "loading PyTorch and transformers\n"
    assert done.stderr.endswith(" is imported\n")


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EACCES, "Permission denied"), (errno.EIO, "Input/output error"), (errno.ELOOP, "Too many levels")],
)
def test_what_the_machine_refuses_is_said_with_the_files_name(monkeypatch, capsys, number, said):
    """Also where nobody foresaw it."""

    def refusing(*_, **__):
        raise OSError(number, os.strerror(number), "some\x1b[31m/file")

    monkeypatch.setattr("tuningfork.recipe.load.load_run_config", refusing)
    assert main(["data", "recipe.yaml"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("tuningfork: some") and "\x1b" not in message
    assert f"/file cannot be used: {said}" in message


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def failing(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "file")

    monkeypatch.setattr("tuningfork.recipe.load.load_run_config", failing)
    with pytest.raises(FileNotFoundError):
        main(["data", "recipe.yaml"])


def test_the_recipe_of_a_run_is_named_where_its_folder_is_given_for_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.yaml").touch()
    assert main(["train", "--resume", "runs/a"]) == 2
    assert "runs/a is a folder. A recipe is a YAML file. The one of the run there is runs/a/config.yaml.\n" in (
        capsys.readouterr().err
    )
    assert main(["train", "--output.dir", "runs/a", "--resume"]) == 2
    assert "runs/a/config.yaml has all settings of the run in output.dir, and is a recipe" in capsys.readouterr().err
