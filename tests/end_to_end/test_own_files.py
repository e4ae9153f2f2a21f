"""What a run writes has the rights that its user's umask gives, and goes nowhere but into its own folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.workbench import Job, make_pairs, write_rows
from tuningfork import cli


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_all_that_a_run_leaves_has_the_mode_that_the_umask_gives(umask: int, job: Job) -> None:
    """Exported weights, checkpoints, caches and reports: a group can read them, or nobody, as its user wants."""
    job = job.but({"train.max_steps": 1, "data.cache": job.folder / "tokens"})
    job.done()
    job.done("data")
    made = [path for top in (job.run, job.cache, job.folder / "tokens") for path in (top, *top.rglob("*"))]
    names = {path.name for path in made}
    assert {"model.safetensors", "config.json", "__0_0.distcp", "fingerprint.json", "ids", "log.txt"} <= names
    assert {"metrics.jsonl", "config.yaml", "data_report.html", "summary.json", "tensorboard"} <= names
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_a_run_folder_that_leads_elsewhere_is_refused_before_any_work(job: Job) -> None:
    """A stranger's run, to be gone on with: what its links lead to stays as it is."""
    job.but({"train.max_steps": 1}).done()
    precious = job.folder / "precious"
    precious.write_text("precious")
    for name in ("log.txt", "metrics.jsonl", "eval.json", "model", "tensorboard"):
        path, kept = job.run / name, job.folder / f"kept {name}"
        if path.exists():
            path.rename(kept)
        path.symlink_to(precious)
        message = job.but({"train.max_steps": 1}).refused("train", "--resume")
        assert f"{path} is a link" in message and "Remove it" in message
        path.unlink()
        if kept.exists():
            kept.rename(path)
    assert precious.read_text() == "precious"
    job.but({"train.max_steps": 1}).done("train", "--resume")


def test_a_run_on_another_disk(job: Job, tmp_path: Path) -> None:
    """The run folder and the caches may be links, and lie below links."""
    for name in ("run", "reference", "tokens"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (job.folder / f"linked {name}").symlink_to(tmp_path / "disk" / name)
    run, reference, tokens = (job.folder / f"linked {name}" for name in ("run", "reference", "tokens"))
    job = job.but(
        {"train.max_steps": 1, "output.dir": run, "reference.cache": reference, "data.cache": tokens},
    )
    job.done()
    job.done("train", "--resume")
    assert (tmp_path / "disk" / "run" / "model" / "model.safetensors").exists()
    assert list((tmp_path / "disk" / "reference").rglob("rows-*.bin")) and list(
        (tmp_path / "disk" / "tokens").iterdir()
    )


# --- what a stranger's files are called and say -----------------------------------------------------------------------

FORGED = "\nstep-0 check: margin exactly 0\r\x1b[2J\x9b1m\u202e\u2066\u2028[bold]b[blink]"
SHOWN = "↵step-0 check: margin exactly 0⟨U+000D⟩⟨U+001B⟩[2J⟨U+009B⟩1m⟨U+202E⟩⟨U+2066⟩⟨U+2028⟩[bold]b[blink]"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def without_orders(text: str) -> str:
    """The text, if a terminal shows it as it is; a new line of it says nothing in our name."""
    assert not OBEYED.search(text), text
    assert "\nstep-0 check: margin exactly 0\n" not in f"\n{text}\n"
    return text


def test_a_name_and_the_words_of_a_row_forge_no_line_and_order_nothing(job: Job) -> None:
    """On the screen, in the log, in the report and its page."""
    folder = job.folder / f"rows{FORGED}"
    folder.mkdir()
    pairs = [
        {"prompt": f"\x1b[2J\u202e{n}", "chosen": f"a{FORGED}", "rejected": "b", f"field{FORGED}": 1} for n in range(8)
    ]
    pairs.append({"prompt": "same", "chosen": f"x{FORGED}", "rejected": f"x{FORGED}"})
    pairs.append({"prompt": "half", "chosen": f"{FORGED}\ud800", "rejected": "b"})
    path = folder / f"pairs{FORGED}.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = job.but({"data.train": path, "train.max_steps": 1, "output.dir": job.folder / f"run{FORGED}"})
    told = job.done("data")
    assert SHOWN in without_orders(told.out) and not told.err
    for name in ("data_report.json", "data_report.html"):
        without_orders((job.run / "data" / name).read_text(encoding="utf-8"))
    report = json.loads((job.run / "data" / "data_report.json").read_text())
    assert report["train"]["tables"][0]["file"] == str(path)

    done = job.done()
    said, log = without_orders(done.out), without_orders((job.run / "log.txt").read_text())
    said_lines = iter(said.splitlines())
    assert all(line in said_lines for line in log.splitlines())  # in this order, with others in between
    assert f"reading pairs{SHOWN}.jsonl: " in said
    assert log.count("\nstep-0 check: ") == said.count("\nstep-0 check: ") == 2  # as it passes, and in the summary
    without_orders((job.run / "data_rows.json").read_text())


def test_an_error_quotes_a_stranger_and_is_still_ours(job: Job, shelf: Path) -> None:
    """The first line that a file cannot have, its name, a model's kind and what a chat template complains of."""
    refusals = []
    path = job.folder / f"pairs{FORGED}.jsonl"
    path.write_text("{")
    refusals.append(job.but({"data.train": path}))
    path.with_name("fields.jsonl").write_text(json.dumps({f"one{FORGED}": 1, f"two{FORGED}": 2}) + "\n")
    refusals.append(job.but({"data.train": path.with_name("fields.jsonl")}))
    model = job.folder / f"model{FORGED}"
    shutil.copytree(shelf / "model", model)
    (model / "config.json").write_text(json.dumps({"model_type": f"kind{FORGED}"}))
    refusals.append(job.but({"model.path": model}))
    complaint = job.folder / "complains"
    shutil.copytree(shelf / "model", complaint)
    words = json.dumps("no\x1b[2J\u202e[bold]")
    (complaint / "chat_template.jinja").write_text("{{ raise_exception(" + words + ") }}")
    write_rows(path.with_name("chat.jsonl"), make_pairs(4))
    refusals.append(job.but({"model.path": complaint, "data.train": path.with_name("chat.jsonl")}))
    for number, refused in enumerate(refusals):
        message = without_orders(refused.refused())
        shown = SHOWN if number < 3 else "no⟨U+001B⟩[2J⟨U+202E⟩[bold]"
        assert shown in message and message.count("\n") == 1, number


def test_a_strange_argument_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell puts the names of files into a command."""
    for arguments in (["data", "recipe.yaml", f"more{FORGED}"], [f"more{FORGED}"]):
        with pytest.raises(SystemExit) as caught:
            sys.exit(cli.main(arguments))
        assert caught.value.code == 2
        without_orders(capsys.readouterr().err)
