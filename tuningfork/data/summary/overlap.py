"""What held-out data has in common with what is trained on, told before a run. data/summary/repeats.py has the rows."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tuningfork.accounts import DataReport
from tuningfork.records import TokenExample, column
from tuningfork.wording import counted


def overlap(
    train: Sequence[TokenExample],
    train_report: DataReport,
    held_out: Sequence[TokenExample],
    held_out_report: DataReport,
) -> str:
    """In a sentence, what makes held-out numbers look better than they are; empty where nothing does.

    A prompt is the same where its tokens are. It takes half a second for a million examples.
    """
    files = {os.path.realpath(file) for file in _files(train_report)}
    if same := [file for file in _files(held_out_report) if os.path.realpath(file) in files]:
        more = f" and {counted(len(same) - 1, 'more')}" if len(same) > 1 else ""
        return f"data.eval and data.train name the same file, {same[0]}{more}: its rows are no held-out ones"
    prompts = column(held_out, "prompt_hash").tolist()
    shared = (set(prompts) - {0}).intersection(column(train, "prompt_hash").tolist())
    n = sum(prompt in shared for prompt in prompts)
    if not n:
        return ""
    has = "has" if n == 1 else "have"
    of_all = f"{n:,} of {counted(len(held_out), 'held-out example')}"
    return f"{of_all} {has} a prompt that is trained on ({n / len(held_out):.1%})"


def _files(report: DataReport) -> list[str]:
    return [file for files in report.sources.values() for file in files]
