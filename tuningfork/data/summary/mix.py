"""What a mix was asked for and what it takes of each source."""

from __future__ import annotations

from collections import Counter

from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import LEFT_OUT
from tuningfork.data.summary.records import Mix, MixPart
from tuningfork.data.summary.sets import SetData


def summarize_mix(data: SetData, config: DataConfig) -> Mix | None:
    """The mix of the training data; None where the recipe asks for none."""
    by, asked = ("counts", config.counts) if config.counts is not None else ("shares", config.shares)
    if asked is None:
        return None
    used = Counter(example.source.file for example in data.examples)
    left = Counter(row.file for row in data.report.dropped_rows if row.reason == LEFT_OUT)
    parts = []
    for number, (source, files) in zip(asked, data.report.sources.items(), strict=True):
        taken = sum(used[file] for file in files)
        usable = taken + sum(left[file] for file in files)
        parts.append(MixPart(source, number, usable, taken, taken / used.total()))
    return Mix(by, parts)
