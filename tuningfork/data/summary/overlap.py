"""What held-out data has in common with what is trained on, told before a run. data/summary/repeats.py has the rows."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from tuningfork.accounts import DataReport
from tuningfork.records import TokenExample, column, prompt_hash
from tuningfork.wording import counted


def overlap(
    train: Sequence[TokenExample],
    train_report: DataReport,
    held_out: Sequence[TokenExample],
    held_out_report: DataReport,
    bos: int | None,
) -> str:
    """In a sentence, what makes held-out numbers look better than they are; empty where nothing does.

    A prompt is the same where its tokens are. What has none, or the tokenizer's `bos` alone, is a document: it is
    looked for as a whole. It takes half a second for a million examples.
    """
    if train_report.joined or held_out_report.joined:
        return "documents are joined (data.over_length: stream), so held-out ones were not looked for among the others"
    files = {os.path.realpath(file) for file in train_report.files}
    if same := [file for file in held_out_report.files if os.path.realpath(file) in files]:
        more = f" and {counted(len(same) - 1, 'more')}" if len(same) > 1 else ""
        return f"data.eval and data.train name the same file, {same[0]}{more}: its rows are no held-out ones"
    none = [0] if bos is None else [0, prompt_hash(np.array([bos], np.int32))]
    prompts = column(held_out, "prompt_hash")
    documents = np.isin(prompts, none)
    alike = np.isin(prompts, column(train, "prompt_hash"))
    again = np.isin(column(held_out, "content"), column(train, "content"))
    kinds = [
        (alike & ~documents, ("has", "have"), "a prompt that is trained on"),
        (again & documents, ("is", "are"), "trained on as a whole"),
    ]
    return "; ".join(
        f"{n:,} of {counted(len(held_out), 'held-out example')} {verbs[n > 1]} {what} ({n / len(held_out):.1%})"
        for found, verbs, what in kinds
        if (n := int(found.sum()))
    )
