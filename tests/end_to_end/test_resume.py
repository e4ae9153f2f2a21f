"""G6 and all that may interrupt a run: whatever happens to it, --resume ends in the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.test_reference import rows_of
from tests.end_to_end.workbench import (
    Child,
    Job,
    Outcome,
    assert_same_state,
    call,
    job_in,
    make_pairs,
    unequal,
    write_rows,
)
from tests.repeated import slow
from tuningfork.models.hf import export
from tuningfork.report.run.writer import RunWriter
from tuningfork.train import checkpoint, held_out, steps
from tuningfork.train.setup import model as model_setup

STEPS = 20


class Crash(BaseException):
    """The process is gone: nothing of ours may catch it and tidy up."""


@pytest.fixture(scope="module")
def whole(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of 20 steps over 38 pairs that nothing interrupts. Steps straddle the boundaries of its epochs."""
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder / "pairs.jsonl", make_pairs(38, seed=3))
    job = job_in(folder, shelf).but(
        data={"train": folder / "pairs.jsonl", "eval": shelf / "held_out.jsonl"},
        train={"max_steps": STEPS},
        output={"save_every": 3},
    )
    assert Child(job.arguments("train"), folder).wait().status == 0
    return job


@pytest.fixture
def again(whole: Job, tmp_path: Path) -> Job:
    """The same job in a run folder of its own."""
    return Job(tmp_path, whole.settings | {"output.dir": tmp_path / "run"})


def assert_same_end(job: Job, whole: Job) -> None:
    """Final weights, optimizer, random generator and export equal to the bit; each step in metrics once, in order."""
    assert_same_state(job, whole, STEPS)
    assert [line["step"] for line in job.metrics()] == list(range(1, STEPS + 1))
    for ours, theirs in zip(job.metrics(), whole.metrics(), strict=True):
        for key in ("epoch", "loss", "lr", "grad_norm", "tokens", "rewards/margin", "logps/chosen"):
            assert ours[key] == theirs[key], (key, ours["step"])
    assert (job.run / "eval.json").read_bytes() == (whole.run / "eval.json").read_bytes()
    assert not list(job.run.rglob("*.partial"))


def crash(job: Job, step: int, options: tuple[str, ...] = ()) -> None:
    """Train until the process dies in a step, counted from the first that this call makes."""
    train_step, count = steps.train_step, iter(range(1, 1000))

    def crashing(*args: Any, **named: Any) -> Any:
        if next(count) == step:
            raise Crash
        return train_step(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "train_step", crashing)
        with pytest.raises(Crash):
            job("train", *options)


@pytest.fixture(scope="module")
def crashed(whole: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job, crashed in its 7th step, with a pair file and a cache of its own; to be copied."""
    folder = tmp_path_factory.mktemp("crashed")
    shutil.copy(whole.settings["data.train"], folder / "pairs.jsonl")
    own = {"data.train": folder / "pairs.jsonl", "output.dir": folder / "run", "reference.cache": folder / "cache"}
    job = Job(folder, whole.settings | own)
    crash(job, step=7)
    return job


@pytest.fixture
def stopped(crashed: Job, tmp_path: Path) -> Job:
    """A copy of it to go on with: checkpoints of steps 3 and 6, six lines of metrics."""
    shutil.copytree(crashed.folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().partition("\n")[2].replace(str(crashed.folder), str(tmp_path)))
    moved = {"output.dir": tmp_path / "run", "reference.cache": tmp_path / "cache"}
    return Job(tmp_path, crashed.settings | moved | {"data.train": tmp_path / "pairs.jsonl"})


def in_child(job: Job, *options: str) -> Outcome:
    return Child(job.arguments("train", *options), job.folder).wait()


def going_on(job: Job) -> list[str]:
    """The command again, with --resume where a run has begun."""
    return job.arguments("train", *(["--resume"] if (job.run / "config.yaml").exists() else []))


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def interrupt_after(step: int, number: int = signal.SIGINT) -> None:
    """Ctrl-C, as it comes from the terminal, or SIGTERM, as soon as the step's line is written."""
    write = RunWriter.line

    def line(self: RunWriter, metrics: Any) -> None:
        write(self, metrics)
        if metrics["step"] == step:
            os.kill(os.getpid(), number)

    RunWriter.line = line  # type: ignore[method-assign]


def die_in(step: int) -> None:
    """kill -9 oneself in a step."""
    train_step, count = steps.train_step, iter(range(1, 1000))

    def dying(*args: Any, **named: Any) -> Any:
        if next(count) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*args, **named)

    steps.train_step = dying  # type: ignore[assignment]


@pytest.mark.parametrize("step, number", [(10, signal.SIGINT), slow(14, signal.SIGINT), (14, signal.SIGTERM)])
def test_twenty_steps_equal_ten_then_ctrl_c_then_ten(again: Job, whole: Job, step: int, number: int) -> None:
    """G6. Ctrl-C or SIGTERM is answered at once, lets the step end, saves, says how to go on and exits with 130;
    --resume ends in the same bits."""
    outcome = Child(again.arguments("train"), again.folder, partial(interrupt_after, step - 1, number)).wait()
    assert outcome.status == 130 and "Traceback" not in outcome.err
    assert outcome.out.count("stopping after this step; press Ctrl-C again to stop at once\n") == 1
    go_on = f"tuningfork train {again.run}/config.yaml --resume"
    assert f"stopped after step {step} as asked; continue with {go_on}" in outcome.out
    assert again.checkpoints()[-1] == f"step-{step}" and not (again.run / "model").exists()
    outcome = in_child(again, "--resume")
    assert outcome.status == 0 and f"continuing from {again.run}/checkpoints/step-{step}" in outcome.out
    assert_same_end(again, whole)


def interrupt_saving(step: int) -> None:
    """Ctrl-C while a checkpoint is written."""
    save = checkpoint.save

    def saving(folder: Path, progress: Any, *rest: Any) -> Path:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return save(folder, progress, *rest)

    checkpoint.save = saving  # type: ignore[assignment]


def interrupt_last_step() -> None:
    interrupt_after(STEPS)


def interrupt_last_checkpoint() -> None:
    interrupt_saving(STEPS)


@pytest.mark.parametrize("interrupt", [interrupt_last_step, interrupt_last_checkpoint])
def test_ctrl_c_in_the_last_step_stops_before_the_evaluation(
    again: Job, whole: Job, interrupt: Callable[[], None]
) -> None:
    """It is not swallowed: the last step is saved, nothing is evaluated or exported until --resume."""
    outcome = Child(again.arguments("train"), again.folder, interrupt).wait()
    go_on = f"tuningfork train {again.run}/config.yaml --resume"
    assert outcome.status == 130 and f"stopped after step {STEPS} as asked; continue with {go_on}" in outcome.out
    assert again.checkpoints()[-1] == f"step-{STEPS}"
    assert not (again.run / "eval.json").exists() and not (again.run / "model").exists()
    assert in_child(again, "--resume").status == 0
    assert_same_end(again, whole)


def interrupt_at(owner: Any, name: str, call: int, number: int) -> None:
    """A signal in the n-th call of a function, which then goes on for long."""
    real, count = getattr(owner, name), iter(range(1, 1000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(count) == call:
            os.kill(os.getpid(), number)
            time.sleep(60)
        return real(*args, **kwargs)

    setattr(owner, name, interrupted)


def interrupt_final_evaluation(number: int) -> None:
    interrupt_at(held_out, "evaluate", 2, number)


def interrupt_export(number: int) -> None:
    interrupt_at(export, "save", 1, number)


@pytest.mark.parametrize(
    "interrupt, number",
    [
        (interrupt_final_evaluation, signal.SIGINT),
        (interrupt_export, signal.SIGTERM),
        slow(interrupt_final_evaluation, signal.SIGTERM),
        slow(interrupt_export, signal.SIGINT),
    ],
)
def test_ctrl_c_after_the_last_step_ends_the_process_at_once(
    again: Job, whole: Job, interrupt: Callable[[int], None], number: int
) -> None:
    """In the final evaluation and the export: status 130, what to do is said; --resume completes the folder."""
    outcome = Child(again.arguments("train"), again.folder, partial(interrupt, number)).wait(40)
    assert outcome.status == 130
    assert outcome.err == (
        "tuningfork: interrupted; what was saved is whole, continue with "
        f"tuningfork train {again.run}/config.yaml --resume\n"
    )
    assert again.checkpoints()[-1] == f"step-{STEPS}" and not (again.run / "model").exists()
    assert in_child(again, "--resume").status == 0
    assert_same_end(again, whole)


@pytest.mark.parametrize("step", [2, 11, slow(13)])
def test_a_crash_costs_only_the_steps_since_the_last_checkpoint(again: Job, whole: Job, step: int) -> None:
    """Killed before the first checkpoint, within the second epoch, and right behind a checkpoint (saved every 3)."""
    outcome = Child(again.arguments("train"), again.folder, partial(die_in, step)).wait()
    assert outcome.status == -signal.SIGKILL
    assert len(again.metrics()) == step - 1
    assert in_child(again, "--resume").status == 0
    assert_same_end(again, whole)


def test_a_resumed_run_does_not_score_the_starting_model_again(stopped: Job, whole: Job) -> None:
    """What it reached on the held-out pairs is in the checkpoint; the end compares with the same bits."""
    out = stopped.done("train", "--resume").out
    assert "evaluating the starting model" not in out and "evaluating the trained model: 11/11 pairs" in out
    assert "before" in out
    assert_same_end(stopped, whole)


def test_held_out_pairs_that_changed_meanwhile_are_scored_by_both_models(again: Job) -> None:
    """Accuracies of two sets of pairs are not compared."""
    path = write_rows(again.folder / "held_out.jsonl", make_pairs(9, seed=5))
    again = again.but({"data.eval": path, "reference.cache": again.folder / "cache"})
    crash(again, step=5)
    write_rows(path, make_pairs(6, seed=6))
    out = again.done("train", "--resume").out
    assert "data.eval holds other rows than when the run began" in out
    assert "evaluating the starting model: 6/6 pairs" in out
    found = json.loads((again.run / "eval.json").read_text())
    assert found["before"]["pairs"] == found["after"]["pairs"] == 6


def test_the_order_of_examples_after_a_resume_is_that_of_the_same_epoch(
    again: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the second epoch: the ids that follow are those of an unbroken run, and each epoch has all of them."""
    seen: list[str] = []
    train_step = steps.train_step

    def noting(scorer: Any, objective: Any, optimizer: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        if len(seen) == 13 * 4:
            raise Crash
        seen.extend(sorted(example.id for example in batch.examples))
        return train_step(scorer, objective, optimizer, batch, *rest, **named)

    monkeypatch.setattr(steps, "train_step", noting)
    again = again.but({"output.save_every": 1, "data.eval": None})
    with pytest.raises(Crash):
        again()
    seen.append("here")
    again.done("train", "--resume")
    seen.remove("here")
    assert len(seen) == STEPS * 4
    assert len(set(seen[: 9 * 4])) == 9 * 4 and len(set(seen[:40])) == 38  # step 10 holds the last 2 and the next 2
    assert len(set(seen[40:76])) == 36


MOMENTS: dict[str, Callable[[Job], bool]] = {
    "config is there": lambda job: (job.run / "config.yaml").exists(),
    "report is there": lambda job: (job.run / "data_rows.json").exists(),
    "first checkpoint is there": lambda job: (job.run / "checkpoints" / "step-3").exists(),
    "a checkpoint is half written": lambda job: any((job.run / "checkpoints").glob("*.partial")),
    "8 lines": lambda job: lines_in(job.run / "metrics.jsonl") >= 8,
    "a later checkpoint is half written": lambda job: any((job.run / "checkpoints").glob(".step-1*.partial")),
    "19 lines": lambda job: lines_in(job.run / "metrics.jsonl") >= 19,
    "evaluated": lambda job: (job.run / "eval.json").exists(),
    "the export has begun": lambda job: any(job.run.glob(".model.*.partial")),
}


def test_killed_at_every_kind_of_moment_in_one_run_folder(again: Job, whole: Job) -> None:
    """kill -9 from start-up to the final export, each followed by --resume: in the end the same bits."""
    killed = []
    for name, ready in MOMENTS.items():
        child = Child(going_on(again), again.folder)
        if child.kill_when(lambda ready=ready: ready(again)):  # type: ignore[misc]
            killed.append(name)
    assert len(killed) >= len(MOMENTS) - 2, f"only killed when: {killed}"
    assert in_child(again, "--resume").status == 0
    assert_same_end(again, whole)


@pytest.mark.slow
def test_killed_after_random_times_in_one_run_folder(again: Job, whole: Job) -> None:
    """kill -9 at five fixed random parts of a run's duration, each followed by --resume: the same bits."""
    begun = time.monotonic()
    in_child(again.elsewhere("measured"))
    duration, rng = time.monotonic() - begun, random.Random(20)
    again = again.but({"output.save_every": 2})
    for _ in range(5):
        at = time.monotonic() + rng.uniform(0.05, 1.0) * duration
        Child(going_on(again), again.folder).kill_when(lambda at=at: time.monotonic() > at)  # type: ignore[misc]
    assert Child(going_on(again), again.folder).wait().status == 0
    assert_same_end(again, whole)


def die_at(operation: int) -> None:
    """kill -9 oneself just before the n-th thing that makes a file whole, moves it or removes it."""
    count = iter(range(1, 10_000))

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for module, names in ((os, ("fsync", "replace", "rename", "rmdir", "unlink")), (shutil, ("rmtree",))):
        for name in names:
            setattr(module, name, counted(getattr(module, name)))


def test_killed_between_any_two_file_operations_in_one_run_folder(again: Job, whole: Job) -> None:
    """kill -9 just before an fsync, rename or removal drawn at random, six times: in the end the same bits."""
    rng, killed = random.Random(5), 0
    for _ in range(6):
        child = Child(going_on(again), again.folder, partial(die_at, rng.randint(1, 60)))
        killed += child.wait().status == -signal.SIGKILL
    assert killed >= 4
    assert Child(going_on(again), again.folder).wait().status == 0
    assert_same_end(again, whole)


def test_a_run_that_is_still_going_is_not_resumed_beside_itself(again: Job) -> None:
    """The first process stands still; a second one with --resume is refused, and the first ends well."""
    child = Child(again.arguments("train"), again.folder)
    try:
        while lines_in(again.run / "metrics.jsonl") < 4:
            time.sleep(0.001)
        child.signal(signal.SIGSTOP)
        assert str(again.run) in again.refused("train", "--resume")
    finally:
        child.signal(signal.SIGCONT)
        status = child.wait().status
    assert status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_ctrl_c_while_the_reference_is_scored_keeps_what_is_scored(again: Job, number: int) -> None:
    """Exit status 130, no traceback; the rows scored so far are in the cache, and the same command goes on."""
    again = again.but({"reference.cache": again.folder / "cache", "pack.tokens": 256})
    outcome = Child(again.arguments("train"), again.folder, partial(interrupt_scoring, number)).wait()
    assert outcome.status == 130 and "no step was done: give the command again" in outcome.err
    assert 0 < len(rows_of(again.cache)) < 2 * (38 + 11)
    again.done()
    assert len(rows_of(again.cache)) == 2 * (38 + 11)


def interrupt_scoring(number: int) -> None:
    from tuningfork.reference.store import ReferenceStore

    add = ReferenceStore.add

    def adding(self: ReferenceStore, examples: Any, logps: Any) -> None:
        add(self, examples, logps)
        if len(self) >= 10:
            os.kill(os.getpid(), number)

    ReferenceStore.add = adding  # type: ignore[method-assign]


def test_an_existing_run_folder_is_refused_without_resume(finished: Job) -> None:
    """Nothing in it is touched; the message says both ways out."""
    before = {path: path.stat().st_mtime_ns for path in finished.run.rglob("*")}
    message = finished.refused()
    assert f"{finished.run} exists" in message and "--resume" in message and "output.dir" in message
    assert before == {path: path.stat().st_mtime_ns for path in finished.run.rglob("*")}


def test_a_folder_of_something_else_is_refused_even_with_resume(job: Job) -> None:
    """A folder with files but without config.yaml is no run; neither is a file."""
    job.run.mkdir()
    (job.run / "thesis.txt").write_text("precious")
    assert "no config.yaml" in job.refused("train", "--resume")
    assert [path.name for path in job.run.iterdir()] == ["thesis.txt"]
    job = job.but({"output.dir": job.folder / "a-file"})
    job.run.write_text("precious")
    assert "a-file" in job.refused() and job.run.read_text() == "precious"


def test_resume_where_there_is_no_run_is_refused(finished: Job, job: Job) -> None:
    """A mistyped output.dir would start from step 0. It says what it looked for, names runs nearby, makes nothing."""
    typo = finished.elsewhere("rnu")
    message = typo.refused("train", "--resume")
    assert f"there is no run in {typo.run}" in message and "no config.yaml" in message
    assert f"Did you mean {finished.run}?" in message and "without --resume" in message
    far = job.but({"output.dir": job.folder / "new" / "run"})
    assert "Did you mean" not in far.refused("train", "--resume") and not far.run.parent.exists()
    for name in (
        "data",
        f".config.yaml.tuningfork-{'0' * 16}.partial",
    ):  # a report on the data, and what a kill left behind
        (job.run / name).mkdir(parents=True)
        assert "there is no run in" in job.refused("train", "--resume")
    job.but({"train.max_steps": 1}).done()


def test_a_run_killed_before_its_first_checkpoint_begins_again_and_says_so(again: Job, whole: Job) -> None:
    crash(again, step=2)
    out = again.done("train", "--resume").out
    assert f"{again.run}: the run had not come to its first checkpoint; it begins at its first step" in out
    assert_same_end(again, whole)


def test_resume_of_a_finished_run_changes_no_result(again: Job, whole: Job) -> None:
    """It trains nothing, exports nothing and succeeds."""
    shutil.copytree(whole.run, again.run)
    said = f"nothing left to train: all {STEPS} steps are done; raise train.epochs or train.max_steps to go on"
    out = again.done("train", "--resume").out
    assert said in out and str(again.run / "model") in out
    assert "reading weights" not in out and "reference" not in out  # neither is waited for
    assert_same_end(again, whole)


@pytest.mark.parametrize("spoilt", ["no scores", "half of the summary", "no model", "a wrong bit"])
def test_resume_of_an_ended_run_that_is_not_whole_says_so_first_and_makes_it_whole(
    again: Job, whole: Job, spoilt: str
) -> None:
    shutil.copytree(whole.run, again.run)
    weights = again.run / "model" / "model.safetensors"
    if spoilt == "no scores":
        (again.run / "eval.json").unlink()
    elif spoilt == "half of the summary":
        (again.run / "summary.json").write_text('{"last_step": 20')
    elif spoilt == "no model":
        shutil.rmtree(again.run / "model")
    else:
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        assert "is not as it was exported" in again.refused("train", "--resume")
        return
    out = again.done("train", "--resume").out
    assert out.index("nothing left to train") < out.index("reading weights")
    assert unequal(again.exported(), whole.exported()) == []
    assert (again.run / "eval.json").exists()


def test_resume_with_other_settings_names_each_with_both_values(finished: Job) -> None:
    """Nothing is trained, and the folder's config.yaml stays."""
    config = (finished.run / "config.yaml").read_bytes()
    message = finished.but({"train.learning_rate": 0.5, "objective.beta": 0.25}).refused("train", "--resume")
    assert "train.learning_rate: the run has 0.003, now 0.5" in message
    assert "objective.beta: the run has 0.1, now 0.25\n" in message
    assert f"tuningfork train {finished.run}/config.yaml --resume gives all that it has" in message
    assert (finished.run / "config.yaml").read_bytes() == config


def test_resume_may_change_how_often_things_are_written(stopped: Job, whole: Job) -> None:
    """Settings of output and the place of the cache do not belong to the result."""
    other = {"output.save_every": 7, "output.keep_last": 1, "reference.cache": whole.cache}
    stopped.but(other).done("train", "--resume")
    assert unequal(stopped.exported(), whole.exported()) == []
    assert stopped.checkpoints() == [f"step-{STEPS}"]


@pytest.mark.parametrize("seed, count", [(4, 38), (3, 37)])
def test_resume_with_other_data_is_refused(stopped: Job, seed: int, count: int) -> None:
    """The pair file has other rows, or one row less, than when the run began."""
    write_rows(stopped.folder / "pairs.jsonl", make_pairs(count, seed=seed))
    message = stopped.refused("train", "--resume")
    assert "step-6 was trained on other examples than data.train gives now" in message


def test_a_refused_resume_leaves_the_report_of_the_run(stopped: Job) -> None:
    """data_rows.json still tells what the run was trained on."""
    write_rows(stopped.folder / "pairs.jsonl", make_pairs(37, seed=3))
    stopped.refused("train", "--resume")
    assert stopped.report()["used"] == 38


def test_a_reference_rebuilt_on_resume_is_that_of_the_starting_model(stopped: Job, whole: Job) -> None:
    """The cache was deleted: every number is scored anew with the starting weights, never with the policy's."""
    before = rows_of(stopped.cache)
    shutil.rmtree(stopped.cache)
    assert "step-0 check: margin exactly 0" in stopped.done("train", "--resume").out
    assert rows_of(stopped.cache) == before == rows_of(whole.cache)
    assert unequal(stopped.exported(), whole.exported()) == []


def test_resume_with_another_starting_model_is_refused(stopped: Job, finished: Job) -> None:
    """Another model in model.path and no cache: a reference built now would not be the model the run started from."""
    shutil.rmtree(stopped.cache)
    message = stopped.but({"model.path": finished.run / "model"}).refused("train", "--resume")
    assert "step-6" in message and "model.path" in message


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_resume_with_an_edited_config_json_is_refused(job: Job, shelf: Path, objective: str) -> None:
    """The same weights under another rotary base are another starting model, also where no cache remembers it."""
    model = job.folder / "model"
    shutil.copytree(shelf / "model", model)
    job = job.but({"model.path": model, "objective.name": objective, "output.save_every": 1})
    if objective == "simpo":
        job = job.but({"reference.cache": None})
    crash(job, step=3)
    edit_json(model / "config.json", lambda config: config["rope_parameters"].update(rope_theta=500.0))
    message = job.refused("train", "--resume")  # before the cache of the other model is looked at, or made anew
    assert "step-2 belongs to a run that started from another model" in message and "config.json" in message
    edit_json(model / "config.json", lambda config: config["rope_parameters"].update(rope_theta=10000.0))
    shutil.rmtree(job.folder / "cache", ignore_errors=True)
    job.done("train", "--resume")


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_resume_in_another_dtype_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """model.dtype auto means another one on another device; the one that the run began with may be named."""
    job = job.but({"objective.name": "simpo", "reference.cache": None, "output.save_every": 1})
    crash(job, step=3)
    with monkeypatch.context() as patch:
        patch.setattr(model_setup, "choose_dtype", lambda model, device: torch.bfloat16)
        message = job.refused("train", "--resume")
    assert "step-2 was computed in float32, this run would go on in bfloat16. Set model.dtype to float32" in message
    job.but({"model.dtype": "float32"}).done("train", "--resume")


def test_activation_memory_may_change_on_resume_and_auto_stays_what_it_was(job: Job) -> None:
    """After running out of memory that is what to change; auto decides nothing anew, whatever else is on a GPU then."""
    job = job.but({"output.save_every": 1, "train.activation_memory": "auto"})
    crash(job, step=3)
    crash(job.but({"train.activation_memory": "block"}), step=2, options=("--resume",))
    out = job.done("train", "--resume").out
    assert "activation memory: block, as chosen when the run began" in out


def test_chance_in_a_step_depends_on_seed_and_step_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding draws on the GPU, whose generator no checkpoint holds."""
    seeds: list[int] = []
    train_step = steps.train_step

    def watched(*args: Any, **named: Any) -> Any:
        seeds.append(torch.initial_seed())
        return train_step(*args, **named)

    job = job.but({"output.save_every": 1})
    monkeypatch.setattr(steps, "train_step", watched)
    job.done()
    whole, cut = list(seeds), job.elsewhere("cut")
    crash(cut, step=4)
    seeds.clear()
    cut.done("train", "--resume")
    assert len(set(whole)) == len(whole) == 10
    assert seeds == whole[3:]
    seeds.clear()
    job.elsewhere("other").but({"train.seed": 1}).done()
    assert not set(seeds) & set(whole)


def test_resume_after_the_model_folder_was_renamed(stopped: Job, whole: Job, shelf: Path) -> None:
    """The same starting weights under another path are the same run."""
    shutil.copytree(shelf / "model", stopped.folder / "renamed")
    stopped.but({"model.path": stopped.folder / "renamed"}).done("train", "--resume")
    assert unequal(stopped.exported(), whole.exported()) == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(stopped: Job, whole: Job) -> None:
    """A truncated file in the newest checkpoint: the message says which folder to remove; then all is well."""
    assert stopped.checkpoints() == ["step-3", "step-6"]
    newest = stopped.run / "checkpoints" / "step-6"
    (data,) = newest.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    message = stopped.refused("train", "--resume")
    assert str(newest) in message and "Remove that folder" in message
    shutil.rmtree(newest)
    stopped.done("train", "--resume")
    assert unequal(stopped.exported(), whole.exported()) == []


def test_a_torn_last_line_of_metrics_is_forgotten(stopped: Job, whole: Job) -> None:
    """A kill in the middle of writing a line leaves no trace of it."""
    with (stopped.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "epo')
    stopped.done("train", "--resume")
    assert [line["step"] for line in stopped.metrics()] == list(range(1, STEPS + 1))


def test_no_step_is_missing_from_metrics_after_a_crash(again: Job, whole: Job) -> None:
    """Lines every 4 steps, checkpoints every 3: the lines still cover each step once."""
    again = again.but({"output.log_every": 4})
    crash(again, step=11)  # last line 8, last checkpoint 9
    again.done("train", "--resume")
    assert sum(line["examples"] for line in again.metrics()) == STEPS * 4
    assert sum(line["tokens"] for line in again.metrics()) == sum(line["tokens"] for line in whole.metrics())


def test_killed_between_the_last_checkpoint_and_the_summary(again: Job, whole: Job) -> None:
    """--resume completes the folder: a summary, the scores and the model."""
    shutil.copytree(whole.run, again.run)
    for name in ("eval.json", "summary.json"):
        (again.run / name).unlink()
    shutil.rmtree(again.run / "model")
    again.done("train", "--resume")
    assert {path.name for path in again.run.iterdir()} == {path.name for path in whole.run.iterdir()}


def test_resume_of_a_finished_run_with_another_export_dtype(again: Job, whole: Job) -> None:
    """It exports as asked, or refuses; it never answers with success and the old file."""
    shutil.copytree(whole.run, again.run)
    outcome = call(again.but({"output.export_dtype": "bfloat16"}).arguments("train", "--resume"))
    assert outcome.status == 2 or "bfloat16" in str({weight.dtype for weight in again.exported().values()})


def test_throughput_of_a_resumed_run_counts_its_own_steps_only(stopped: Job) -> None:
    """Resumed at step 6: the summary is about 14 steps, and its rate divides their tokens by their seconds."""
    stopped.done("train", "--resume")
    summary = json.loads((stopped.run / "summary.json").read_text())
    assert (summary["first_step"], summary["last_step"], summary["steps"]) == (7, STEPS, STEPS - 6)
    assert summary["tokens"] == sum(line["tokens"] for line in stopped.metrics()[6:])
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / summary["seconds"])


def test_a_start_that_follows_a_failure_goes_on_by_itself(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher starts processes again with the arguments of the first start, which said nothing of a run."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert job.but({"train.max_steps": 2}).done().status == 0, "nothing had begun, so it begins"
    outcome = job.but({"train.max_steps": 3}).done()
    assert f"continuing from {job.run}/checkpoints/step-2" in outcome.out
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert "exists. Add --resume" in job.but({"train.max_steps": 4}).refused()
