"""Held-out pairs scored between steps: no bit of the run depends on it, and the best step is kept and exported."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.test_resume import crash, die_in, in_child, interrupt_at
from tests.end_to_end.workbench import Child, Job, assert_same_state, job_in, make_pairs, state_of, unequal, write_rows
from tests.repeated import slow
from tuningfork.objective.pairs import DPO
from tuningfork.report.run.metrics import Evaluation, evaluation_definitions
from tuningfork.train import checkpoint, held_out

STEPS = 10
SAME = ("epoch", "loss", "lr", "grad_norm", "tokens", "rewards/margin", "logps/chosen")


@pytest.fixture(scope="module")
def plain(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Ten steps with held-out pairs of the other mind: what training learns makes them ever worse."""
    folder = tmp_path_factory.mktemp("plain")
    rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in make_pairs(11, seed=5)]
    write_rows(folder / "held_out.jsonl", rows)
    job = job_in(folder, shelf).but(data={"eval": folder / "held_out.jsonl"}, output={"save_every": 4, "keep_last": 1})
    job.done()
    return job


@pytest.fixture(scope="module")
def watched(plain: Job) -> Job:
    """The same with an evaluation every 3 steps, which are none of those that are saved."""
    job = plain.elsewhere("watched").but({"train.eval_every": 3})
    job.done()
    return job


@pytest.fixture
def again(watched: Job, tmp_path: Path) -> Job:
    """The watched job in a run folder of its own."""
    return Job(tmp_path, watched.settings | {"output.dir": tmp_path / "run"})


def assert_same_run(job: Job, other: Job) -> None:
    """Weights, optimizer, random generator, export, best step and all lines are equal to the bit."""
    assert_same_state(job, other, STEPS)
    assert [[line[key] for key in ("step", *SAME)] for line in job.metrics()] == [
        [line[key] for key in ("step", *SAME)] for line in other.metrics()
    ]
    assert job.evaluations() == other.evaluations()
    assert job.checkpoints() == other.checkpoints()
    assert (job.run / "eval.json").read_bytes() == (other.run / "eval.json").read_bytes()


def test_no_bit_of_a_run_depends_on_being_watched(plain: Job, watched: Job) -> None:
    """Weights, optimizer, random generator, export and every line of training."""
    assert_same_state(plain, watched, STEPS)
    for ours, theirs in zip(plain.metrics(), watched.metrics(), strict=True):
        assert [ours[key] for key in ("step", *SAME)] == [theirs[key] for key in ("step", *SAME)]


def test_every_evaluation_is_a_line_a_scalar_and_a_sentence(plain: Job, job: Job) -> None:
    """The starting model, every third step, and the end; each behind the line of its step."""
    watched = plain.but({"train.eval_every": 3, "output.dir": job.run})
    out = watched.done().out
    assert [line["step"] for line in watched.evaluations()] == [0, 3, 6, 9, 10]
    assert [line["step"] for line in watched.lines()] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 10]
    defined = list(evaluation_definitions("pairs", DPO.statistics_defined))
    assert all(list(line) == defined for line in watched.lines() if "lr" not in line)
    board = EventAccumulator(str(watched.run / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("eval/loss")]
    assert shown == [(line["step"], pytest.approx(line["eval/loss"], rel=1e-6)) for line in watched.evaluations()]
    assert "step 0: held-out loss 0.6931, margin 0, accuracy 50.0%\n" in out
    for step in (3, 6, 9):
        assert f"evaluating after step {step}: 11/11 pairs" in out and f"\nstep {step}: held-out loss " in out
    scores = json.loads((watched.run / "eval.json").read_text())
    first, last = watched.evaluations()[0], watched.evaluations()[-1]
    assert scores["before"] == {key.removeprefix("eval/"): value for key, value in first.items() if key != "step"}
    assert scores["after"] == {key.removeprefix("eval/"): value for key, value in last.items() if key != "step"}


def test_an_evaluation_between_steps_has_the_bits_of_one_from_the_checkpoint(plain: Job, job: Job) -> None:
    """Its line is lost with a whole metrics.jsonl, so the continued run scores the checkpoint's weights anew."""
    job = plain.but({"train.eval_every": 3, "output.save_every": 3, "output.dir": job.run})
    crash(job, step=8)
    lines = job.evaluations()
    (job.run / "metrics.jsonl").unlink()
    assert "evaluating after step 6" in job.done("train", "--resume").out
    assert [line["step"] for line in lines] == [0, 3, 6] and job.evaluations()[0] == lines[2]


def test_the_best_step_is_kept_beyond_the_newest_and_said(watched: Job, plain: Job) -> None:
    """Held-out loss only rises: the first evaluation is the best, and its step was saved for that alone."""
    losses = [line["eval/loss"] for line in watched.evaluations()]
    assert losses == sorted(losses)
    assert watched.checkpoints() == ["step-3", "step-10"] and plain.checkpoints() == ["step-10"]
    best = json.loads((watched.run / "eval.json").read_text())["best"]
    assert best == {"step": 3, **{k.removeprefix("eval/"): v for k, v in watched.evaluations()[1].items()}}
    out = watched.done("train", "--resume").out
    assert "! no step is better than the starting model; step 10 is exported anyway" in out
    assert f"  {watched.run / 'eval.json'}\n" in out
    assert "step 3, the best" in out and "exported model, step 10" in out
    assert "best" not in json.loads((plain.run / "eval.json").read_text())


@pytest.mark.parametrize("by, sign", [("loss", -1), ("accuracy", 1), ("margin", 1)])
def test_the_best_is_told_by_the_measure_that_is_named(
    job: Job, shelf: Path, by: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number has its best at another step; of equals the earliest is kept."""
    numbers = {3: (0.5, 0.6, 0.2), 6: (0.4, 0.6, 0.1), 9: (0.45, 0.8, 0.1), 10: (0.4, 0.8, 0.3)}
    steps = iter([0, *numbers])
    real = Evaluation.as_dict

    def scores(self: Evaluation) -> dict[str, Any]:
        if (found := numbers.get(step_of.setdefault(id(self), next(steps, 10)))) is None:
            return real(self)
        return real(self) | dict(zip(("loss", "rewards/accuracy", "rewards/margin"), found, strict=True))

    kept: list[Evaluation] = []
    step_of: dict[int, int] = {}
    evaluate = held_out.evaluate

    def keeping(*args: Any) -> Evaluation:
        kept.append(evaluate(*args))  # so that no two have one id
        return kept[-1]

    monkeypatch.setattr(held_out, "evaluate", keeping)
    monkeypatch.setattr(Evaluation, "as_dict", scores)
    job = job.but({"data.eval": shelf / "held_out.jsonl", "train.eval_every": 3, "train.best_by": by})
    job.but({"output.keep_last": 1}).done()
    expected = {"loss": 6, "accuracy": 9, "margin": 10}[by]
    assert json.loads((job.run / "eval.json").read_text())["best"]["step"] == expected
    assert job.checkpoints() == sorted({f"step-{expected}", "step-10"}, key=lambda name: int(name[5:]))


def test_the_best_step_is_exported_on_request_and_the_last_stays(watched: Job, again: Job) -> None:
    """`output.export: best` on a run that has ended: the weights of that step; the other model keeps its own name."""
    shutil.copytree(watched.run, again.run)
    last = again.exported()
    outcome = again.but({"output.export": "best"}).done("train", "--resume")
    state = state_of(again.run / "checkpoints" / "step-3")
    assert all(torch.equal(weight, state[f"model.{name}"]) for name, weight in again.exported().items())
    assert f"kept as {again.run / 'model-step-10'}" in outcome.out and "exported model, step 3" in outcome.out
    assert json.loads((again.run / "export.json").read_text()) == {"step": 3}
    again.done("train", "--resume")  # and back
    assert unequal(again.exported(), last) == []
    assert (again.run / "model-step-3").exists()
    refused = again.but({"output.export": "best"}).refused("train", "--resume")
    assert "model-step-10, which exists" in refused
    assert unequal(again.exported(), last) == []


def test_a_damaged_best_checkpoint_is_named_with_the_ways_out(watched: Job, again: Job) -> None:
    """Nothing is exported from it; without it the best of the others is, or the last on request."""
    shutil.copytree(watched.run, again.run)
    (data,) = (again.run / "checkpoints" / "step-3").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    best = again.but({"output.export": "best"})
    message = best.refused("train", "--resume")
    assert "step-3 cannot be loaded" in message and "output.export: last" in message
    assert json.loads((again.run / "export.json").read_text()) == {"step": 10}
    assert unequal(again.exported(), watched.exported()) == []
    shutil.rmtree(again.run / "checkpoints" / "step-3")
    assert "exported model, step 10" in best.done("train", "--resume").out


def test_a_run_exports_its_best_step_at_once(again: Job) -> None:
    again.but({"output.export": "best"}).done()
    state = state_of(again.run / "checkpoints" / "step-3")
    assert all(torch.equal(weight, state[f"model.{name}"]) for name, weight in again.exported().items())
    assert not (again.run / "model-step-10").exists()


@pytest.mark.parametrize("step", [3, slow(4), slow(7), 8, slow(10)])
def test_a_killed_run_has_the_lines_and_the_best_of_an_unbroken_one(again: Job, watched: Job, step: int) -> None:
    """kill -9 in the step after an evaluation, after a checkpoint, and between the two."""
    assert Child(again.arguments("train"), again.folder, partial(die_in, step)).wait().status == -signal.SIGKILL
    options = ("--resume",) if (again.run / "config.yaml").exists() else ()
    assert in_child(again, *options).status == 0
    assert_same_run(again, watched)


def die_evaluating(call: int) -> None:
    """kill -9 oneself in the n-th evaluation, that of the starting model being the first."""
    evaluate, count = held_out.evaluate, iter(range(1, 1000))

    def dying(*args: Any) -> Any:
        if next(count) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*args)

    held_out.evaluate = dying  # type: ignore[assignment]


def die_saving_the_best() -> None:
    """kill -9 oneself between an evaluation's line and the checkpoint that keeps its step."""
    save = checkpoint.save

    def dying(folder: Path, progress: Any, *rest: Any) -> Path:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(folder, progress, *rest)

    checkpoint.save = dying  # type: ignore[assignment]


@pytest.mark.parametrize("kill", [partial(die_evaluating, 3), slow(partial(die_evaluating, 5)), die_saving_the_best])
def test_a_kill_around_an_evaluation_changes_nothing(again: Job, watched: Job, kill: Any) -> None:
    assert Child(again.arguments("train"), again.folder, kill).wait().status == -signal.SIGKILL
    assert in_child(again, "--resume").status == 0
    assert_same_run(again, watched)


def interrupt_evaluating(number: int) -> None:
    """Ctrl-C or SIGTERM when the first pack of the evaluation after step 6 was scored."""
    score, evaluating = held_out.score_held_out, list[bool]()

    def scoring(start: Any, data: Any, reference: Any, console: Any, name: str, *rest: Any) -> Any:
        if name.endswith("step 6"):
            packs = type(start).packs

            def interrupted(self: Any, *args: Any) -> Any:
                for pack in packs(self, *args):
                    evaluating.append(True)
                    if len(evaluating) == 1:
                        os.kill(os.getpid(), number)
                    yield pack

            type(start).packs = interrupted
        return score(start, data, reference, console, name, *rest)

    from tuningfork.train import prepare

    prepare.score_held_out = scoring  # type: ignore[assignment]


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
def test_ctrl_c_in_an_evaluation_breaks_it_off_and_it_is_made_on_resume(again: Job, watched: Job, number: int) -> None:
    """The step that it stands behind is saved; --resume begins with it, and ends as the unbroken run."""
    small = again.but({"pack.tokens": 256})  # several packs of held-out pairs
    unbroken = watched.elsewhere("small").but({"pack.tokens": 256})
    if not unbroken.run.exists():
        unbroken.done()
    outcome = Child(small.arguments("train"), small.folder, partial(interrupt_evaluating, number)).wait()
    assert outcome.status == 130 and "Traceback" not in outcome.err
    assert (
        f"stopped after step 6 as asked; continue with tuningfork train {small.run}/config.yaml --resume" in outcome.out
    )
    assert "step-6" in small.checkpoints() and [line["step"] for line in small.evaluations()] == [0, 3]
    outcome = in_child(small, "--resume")
    assert outcome.status == 0 and "evaluating after step 6: 11/11 pairs" in outcome.out
    assert_same_run(small, unbroken)


def interrupt_first(number: int) -> None:
    interrupt_at(held_out, "evaluate", 1, number)


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM])
def test_ctrl_c_in_the_evaluation_of_the_starting_model(again: Job, watched: Job, number: int) -> None:
    """No run has begun; the same command begins one."""
    outcome = Child(again.arguments("train"), again.folder, partial(interrupt_first, number)).wait(40)
    assert outcome.status == 130 and "no step was done: give the command again" in outcome.err
    assert not again.run.exists()
    assert in_child(again).status == 0
    assert_same_run(again, watched)


def test_evaluations_are_no_part_of_the_rates_of_training(again: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes half a second more than it needs: the steps, in all and each, take less than one of them."""
    import time

    evaluate = held_out.evaluate

    def slow(*args: Any) -> Any:
        begun = time.perf_counter()
        time.sleep(1.5)
        found = evaluate(*args)
        return replace(found, seconds=time.perf_counter() - begun)

    monkeypatch.setattr(held_out, "evaluate", slow)
    again.done()
    summary = json.loads((again.run / "summary.json").read_text())
    assert summary["evaluation_seconds"] >= 5 * 1.5
    assert summary["seconds"] == pytest.approx(sum(line["step_s"] for line in again.metrics()))
    waited = [line["step_s"] for line in again.metrics() if line["step"] in (4, 7, 10)]
    assert all(0 < seconds < 1.5 for seconds in waited)


def test_other_held_out_pairs_begin_the_search_for_the_best_anew(again: Job, watched: Job) -> None:
    """Numbers of two sets of pairs are not compared: the lines of the first are gone, and that is said."""
    path = again.folder / "held_out.jsonl"
    shutil.copy(watched.settings["data.eval"], path)
    again = again.but({"data.eval": path})
    crash(again, step=6)
    write_rows(path, make_pairs(6, seed=6))
    out = again.done("train", "--resume").out
    assert "what was found on the others is forgotten" in out
    assert [(line["step"], line["eval/pairs"]) for line in again.evaluations()] == [(0, 6), (6, 6), (9, 6), (10, 6)]
    assert json.loads((again.run / "eval.json").read_text())["best"]["pairs"] == 6


def test_how_often_may_change_on_resume_and_the_measure_may_not(again: Job, watched: Job) -> None:
    crash(again, step=6)
    assert "train.best_by: the run has 'loss', now 'margin'" in again.but({"train.best_by": "margin"}).refused(
        "train", "--resume"
    )
    again.but({"train.eval_every": 2}).done("train", "--resume")
    assert [line["step"] for line in again.evaluations()] == [0, 3, 4, 6, 8, 10]
    assert unequal(again.exported(), watched.exported()) == []


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"data.eval": None, "train.eval_every": 2}, "train.eval_every is 2, but there is nothing to evaluate on"),
        ({"train.best_by": "margin"}, "train.best_by is margin, but only with train.eval_every"),
        ({"output.export": "best"}, "output.export is best, but only with train.eval_every"),
        ({"train.early_stopping_patience": 2}, "but only with train.eval_every are there evaluations to stop by"),
        (
            {"train.eval_every": 2, "train.early_stopping_threshold": 0.1},
            "train.early_stopping_threshold is 0.1, but no run stops early without train.early_stopping_patience",
        ),
        ({"train.eval_every": 0}, "train.eval_every is 0; allowed: a whole number, at least 1, or null"),
    ],
)
def test_settings_without_anything_to_work_on_are_refused(
    job: Job, shelf: Path, settings: dict[str, Any], said: str
) -> None:
    assert said in job.but({"data.eval": shelf / "held_out.jsonl"} | settings).refused()
    assert not job.run.exists()
