"""The files for schedulers: they are what a shell, a cluster and our command line take, and do what they say."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tuningfork.cli import _parser, _read

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes" / "cluster"
FAKE = """#!/bin/bash
echo "$(basename "$0") $(printf '%q ' "$@")" >> "$CALLS"
[[ $(basename "$0") == scancel ]] && touch told
[[ "$1" == show ]] && printf 'node7\\nnode8\\n'
if [[ $(basename "$0") == srun && "$*" == *" train "* && $ENDS == told ]]; then
    until [[ -e told ]]; do sleep 0.05; done
    sleep 0.5
    exit 130
fi
exit 0
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a recipe, an environment, and a scheduler's programs that write down how they are called."""
    (tmp_path / "recipe.yaml").write_text("model: {path: model}\ndata: {train: pairs.jsonl}\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "bin").mkdir()
    for program in ("srun", "scontrol", "scancel", "tuningfork"):
        (tmp_path / "bin" / program).write_text(FAKE)
        (tmp_path / "bin" / program).chmod(0o755)
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    return (
        os.environ | {"CALLS": str(place / "calls"), "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "ENDS": ""} | more
    )


def slurm(place: Path, ends: str = "") -> subprocess.Popen[bytes]:
    about = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1234567", "ENDS": ends}
    return subprocess.Popen(["bash", FOLDER / "slurm.sbatch"], cwd=place, env=environment(place, **about))


def calls(place: Path, program: str) -> list[list[str]]:
    lines = (place / "calls").read_text().splitlines() if (place / "calls").exists() else []
    return [words[1:] for words in map(shlex.split, lines) if words[0] == program]


def taken(words: list[str], monkeypatch: pytest.MonkeyPatch, place: Path) -> Namespace:
    """What our command line reads of `tuningfork launch ...`, with the recipe that is named there."""
    monkeypatch.chdir(place)
    parser = _parser()
    launch = parser.parse_args(words)
    own, config, _ = _read(parser, launch.what, launch.arguments)
    return Namespace(**vars(launch) | {"own": own, "config": config})


def test_slurm_checks_the_cluster_before_a_run_begins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm(place).wait(60) == 0
    check, train = (taken(words[1:], monkeypatch, place) for words in calls(place, "srun"))
    assert (check.what, train.what) == ("check-cluster", "train")
    for launch in (check, train):
        assert (launch.nodes, launch.rendezvous) == (2, "node7:24567")
        assert launch.config.output.dir == "runs/first"
    assert not train.own.resume and train.max_restarts == 2
    assert calls(place, "scancel") == [] and [words[0] for words in calls(place, "scontrol")] == ["show"]


def test_slurm_goes_on_with_a_run_that_has_begun(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "runs/first").mkdir(parents=True)
    (place / "runs/first/config.yaml").touch()
    assert slurm(place).wait(60) == 0
    [words] = calls(place, "srun")
    assert taken(words[1:], monkeypatch, place).own.resume


def test_slurm_saves_and_comes_back_when_its_time_is_over(place: Path) -> None:
    script = slurm(place, ends="told")
    end = time.monotonic() + 60
    while len(calls(place, "srun")) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 130
    assert calls(place, "scancel") == [["--signal=TERM", "1234567"]]
    assert calls(place, "scontrol")[-1] == ["requeue", "1234567"]


def test_slurm_leaves_time_to_save() -> None:
    lines = (FOLDER / "slurm.sbatch").read_text().splitlines()
    [warned] = [line.split("TERM@")[1].split()[0] for line in lines if line.startswith("#SBATCH --signal=B:TERM@")]
    [grace] = [line.split("--grace ")[1].split()[0] for line in lines if line.startswith("srun") and "--grace" in line]
    assert int(grace) < int(warned)


def jobset() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "jobset.yaml").read_text())


@pytest.mark.parametrize("begun", [False, True])
def test_kubernetes_begins_and_goes_on(begun: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [job] = jobset()["spec"]["replicatedJobs"]
    pods, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    said = {entry["name"]: entry["value"] for entry in container["env"]}
    if begun:
        (place / said["RUN"]).mkdir(parents=True)
        (place / said["RUN"] / "config.yaml").touch()
    subprocess.run(container["command"], cwd=place, env=environment(place, **said), check=True, timeout=60)
    [words] = calls(place, "tuningfork")
    launch = taken(words, monkeypatch, place)
    assert (launch.what, launch.own.resume) == ("train", begun)
    assert launch.nodes == pods["parallelism"] == pods["completions"]
    name = jobset()["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert launch.rendezvous == f"{name}-{job['name']}-0-0.{name}:{port}"  # of JobSet: its first pod
    assert launch.grace < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_what_the_page_says_is_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/cluster.md: by our command line, or by torchrun and then by ours."""
    page = (ROOT / "docs" / "cluster.md").read_text().replace("\\\n", " ")
    blocks = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    commands = [shlex.split(line, comments=True) for line in blocks if line.startswith(("tuningfork ", "torchrun "))]
    found = set()
    for program, *words in commands:
        found.add(program)
        if program == "torchrun":
            arguments = get_args_parser().parse_args(words)
            assert (arguments.module, arguments.training_script) == (True, "tuningfork")
            name, *rest = arguments.training_script_args
            monkeypatch.chdir(place)
            _read(_parser(), name, rest)
        elif words[0] == "launch":
            taken(words, monkeypatch, place)
        else:
            monkeypatch.chdir(place)
            _read(_parser(), words[0], words[1:])
    assert found == {"tuningfork", "torchrun"} and len(commands) > 4
