"""Models, runs and working folders that somebody else made: no command runs or asks for anything that they hold."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.workbench import Job, call, make_pairs, write_rows
from tests.payload import Payload
from tuningfork.data.tokens import workers
from tuningfork.files import DIGESTS, seal
from tuningfork.models.hf import digests


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once something has been run."""
    return tmp_path / "ran"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked on the terminal, where somebody says yes to everything."""
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": [questions.append(question), "y"][1])
    return questions


@pytest.mark.parametrize("command", ["data", "train", "reference", "eval"])
def test_no_command_runs_or_asks_to_run_the_code_of_a_model(
    finished: Job, job: Job, shelf: Path, ran: Path, asked: list[str], command: str
) -> None:
    folder = job.folder / "model"
    shutil.copytree(shelf / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {f"Auto{name}": "own.X" for name in ("Config", "Model", "ModelForCausalLM", "Processor")}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "somebodys", "auto_map": classes}))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    job = job.but({"model.path": folder, "data.eval": shelf / "held_out.jsonl"})
    options = ("--policy", str(finished.run / "model")) if command == "eval" else ()
    message = job.refused(command, *options)
    assert "names code of its own for it (auto_map), which is never run here" in message
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": classes, "tokenizer_class": "AutoProcessor"}))
    (folder / "tokenizer_config.json").write_text("{}")
    message = job.refused(command, *options)
    assert "sets tokenizer_class to 'AutoProcessor', which is no tokenizer of transformers" in message
    assert asked == [] and not ran.exists()


def test_a_policy_is_no_more_trusted_than_a_model(finished: Job, shelf: Path, ran: Path, asked: list[str]) -> None:
    policy = ran.parent / "policy"
    shutil.copytree(finished.run / "model", policy)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"model_type": "x", "auto_map": {"AutoConfig": "own.X"}}))
    (policy / "own.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    (policy / digests.NAME).unlink()
    assert "which is never run here" in finished.refused("eval", "--policy", str(policy))
    assert asked == [] and not ran.exists()


def test_a_run_that_somebody_else_made_is_not_continued_by_its_own_program(
    finished: Job, tmp_path: Path, ran: Path
) -> None:
    """Its checksums are right: whoever made it made these, too."""
    shutil.copytree(finished.run, tmp_path / "run")
    job = finished.but({"output.dir": tmp_path / "run", "train.epochs": 4})  # or its checkpoint is not needed
    newest = job.run / "checkpoints" / job.checkpoints()[-1]
    (newest / ".metadata").write_bytes(pickle.dumps(Payload(ran)))
    (newest / DIGESTS).unlink()
    seal(newest)
    message = job.refused("train", "--resume")
    assert f"{newest} cannot be loaded (.metadata: it calls for 'posix.mkdir'" in message
    assert "Nothing of it was run" in message and "begin a new one in another output.dir" in message
    stood = newest / "progress.json"
    stood.write_text(json.dumps(json.loads(stood.read_text()) | {"data_digest": "of other data"}))
    (newest / DIGESTS).unlink()
    seal(newest)
    # Said before anything of it is read that is no JSON.
    assert "was trained on other examples" in job.refused("train", "--resume")
    assert not ran.exists()


def test_files_of_the_current_folder_are_not_taken_for_pythons_own(
    job: Job, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes that are started would otherwise do, which begin with `python -c`."""
    here = job.folder / "here"
    here.mkdir()
    for name in ("multiprocessing", "signal", "struct", "tokenizers", "numpy", "tuningfork"):
        (here / f"{name}.py").write_text(f"import os\nos.makedirs({str(ran)!r}, exist_ok=True)\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(workers, "ROWS_A_PROCESS", 10)
    began: list[int] = []
    started = workers.Workers._started
    monkeypatch.setattr(workers.Workers, "_started", lambda *args: [began.append(args[1]), started(*args)][1])
    job = job.but({"data.train": write_rows(job.folder / "many.jsonl", make_pairs(600)), "data.workers": 2})
    outcome = call(job.arguments("data"))
    assert outcome.status == 0, outcome.err
    assert began == [2] and not ran.exists()
