"""The tables that a command ends with."""

from __future__ import annotations

from collections.abc import Mapping

from tuningfork.accounts import DataReport
from tuningfork.objective.base import Objective
from tuningfork.report.run.console import score, table
from tuningfork.report.run.writer import Scores
from tuningfork.train.ended import places
from tuningfork.train.run import RunResult
from tuningfork.train.session import Data


def summary(result: RunResult, data: Data, objective: Objective) -> str:
    """What a finished run ended with, as text of several lines."""
    parts = [table("data", _data_rows("train", data.train_report) + _held_out_rows(data))]
    of_steps, of_evaluations = objective.loss_names
    if result.checked is not None:
        parts.append(f"step-0 check: margin exactly 0 for all {result.checked:,} {objective.unit} of the first step")
    if result.ends:
        trained = {f"step {line['step']}": {**line, objective.unit: line["examples"]} for line in result.ends}
        title = f"training {objective.unit}: first and last line of metrics.jsonl"
        parts.append(table(title, evaluation_rows(trained, objective, of_steps)))
    if result.after is not None:
        columns: dict[str, Scores] = {} if result.before is None else {"before": result.before.as_dict()}
        columns["after"] = result.after.as_dict()
        if result.best is not None and result.best.step != result.steps_done:
            columns[f"step {result.best.step}, the best"] = result.best.scores
        parts.append(table(f"held-out {objective.unit}", evaluation_rows(columns, objective, of_evaluations)))
        if result.no_gain:
            parts.append(f"! no step is better than the starting model; step {result.exported_step} is exported anyway")
    if result.throughput.get("steps"):
        rates = result.throughput
        rows = [
            ("steps", f"{result.steps_done:,}"),
            ("tokens/s (prompt once per answer)", _number(rates["tokens_per_s"])),
            ("unique tokens/s", _number(rates["unique_tokens_per_s"])),
            ("examples/s", _number(rates["examples_per_s"])),
            ("padding share", f"{rates['pad_share']:.1%}"),
            *([] if rates["mfu"] is None else [("model flops utilisation", f"{rates['mfu']:.1%}")]),
        ]
        if rates["warmup_steps"]:
            rows.append(("warm-up (compilation), not in the rates", f"{rates['warmup_seconds']:.0f} s"))
        parts.append(table("training", rows))
    parts.append("\n".join(places(result.folder, result.exported_step, result.after is not None)))
    return "\n\n".join(parts)


def _data_rows(name: str, report: DataReport) -> list[tuple[str, str]]:
    rows = [(f"{name}: rows read", f"{report.rows_read:,}"), (f"{name}: used", f"{report.used:,}")]
    return rows + [(f"{name}: dropped, {reason}", f"{count:,}") for reason, count in report.dropped.items()]


def _held_out_rows(data: Data) -> list[tuple[str, str]]:
    return [] if data.held_out_report is None else _data_rows("held-out", data.held_out_report)


def evaluation_rows(columns: Mapping[str, Scores], objective: Objective, loss: str) -> list[tuple[str, ...]]:
    """One row a number, one column an evaluation under its heading; `loss` is what the loss is called."""
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, key in {**objective.headline, loss: "loss", objective.unit: objective.unit}.items():
        values = [scores[key] for scores in columns.values()]
        shown = [_number(value, name) for value in values]
        rows.append((name, *shown))
    return rows


def _number(value: float | int | None, heading: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else score(heading, value)
