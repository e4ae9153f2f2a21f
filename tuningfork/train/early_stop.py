"""Early stopping: whether evaluations have stopped getting better, told from their numbers alone.

A run keeps every evaluation in metrics.jsonl, and no other count. So a run that is continued stops where an unbroken
one does, and all ranks, which have the same numbers, stop together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tuningfork.data.prepare import dataset_digest
from tuningfork.report.run.writer import Scores, evaluations_of, read_metrics
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.session import Data
from tuningfork.wording import counted

MEASURES = {"loss": ("loss", -1), "accuracy": ("rewards/accuracy", 1), "margin": ("rewards/margin", 1)}
"""train.best_by -> the number of an evaluation, and whether more of it is better."""


def out_of_patience(evaluations: Mapping[int, Scores], step: int, config: TrainConfig) -> str | None:
    """Why a run stops early behind the evaluation after `step` steps, as a sentence's beginning; None where it goes on.

    Those count that `eval_every` asks for: not the starting model's, as the step that did best is one that has moved
    the weights, and not that behind the last step of a run that was then made longer, which a longer one has not. An
    evaluation is better where it is so by more than `early_stopping_threshold`, compared with the last one that was. So
    many small steps that go one way come to a better one in the end.
    """
    if config.early_stopping_patience is None or config.eval_every is None:
        return None
    counting = [at for at in sorted(evaluations) if 0 < at <= step and at % config.eval_every == 0]
    if step not in counting:
        return None
    key, sign = MEASURES[config.best_by]
    best: tuple[int, float] | None = None
    waited = 0
    for at in counting:
        value = evaluations[at][key]
        if value is not None and (best is None or sign * (value - best[1]) > config.early_stopping_threshold):
            best, waited = (at, value), 0
        else:
            waited += 1
    if waited < config.early_stopping_patience:
        return None
    least = config.early_stopping_threshold
    found = "had a number" if best is None else f"was better than {best[1]:.6g} of step {best[0]}"
    by = f" by more than {least:g}" if least and best is not None else ""
    return f"no held-out {config.best_by} {found}{by} in {counted(waited, 'evaluation')} up to step {step}"


def stopped_early(folder: Path, saved: Progress, data: Data, config: TrainConfig) -> str | None:
    """Why the run in a folder, whose last checkpoint is `saved`, goes no further, as `out_of_patience` says it.

    Raises RunFolderError where metrics.jsonl is not as the run wrote it.
    """
    if config.early_stopping_patience is None or saved.held_out_digest != dataset_digest(data.held_out):
        return None
    return out_of_patience(evaluations_of(read_metrics(folder / "metrics.jsonl")), saved.step, config)
