"""The order in which a run goes through its examples, as its settings ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tuningfork.data.packing.groups import Groups
from tuningfork.data.packing.loader import EpochOrder, Order
from tuningfork.data.packing.stages import staged
from tuningfork.data.packing.tree import Share
from tuningfork.records import TokenExample, column
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import PROMPT, TrainConfig
from tuningfork.wording import counted


def asked_of_rows(config: TrainConfig) -> str | None:
    """What examples must keep of their rows for the order, see `with_group`; None where their tokens tell all."""
    return config.group_by if config.order == "grouped" and config.group_by != PROMPT else None


def order_of_run(
    examples: Sequence[TokenExample], config: TrainConfig, saved: Progress | None = None, stages: Sequence[int] = ()
) -> Order:
    """The order of a run's examples, from where its checkpoint stands, if it has one.

    Args:
        stages: how many of the examples are there for each line of train.length_steps, and for the rest of the run;
            empty without that setting. Such an order needs no checkpoint: each step of it is a whole one.
    """
    if not stages:
        return order_of(examples, config, saved)
    assert config.tokens_per_step is not None and config.max_steps is not None  # as check_run_config has seen
    sizes = column(examples, "plain_tokens").astype(np.int64)
    steps = [steps for steps, _ in config.length_steps or []]
    return staged(sizes, stages, steps, config.tokens_per_step, config.seed, config.max_steps)


def order_of(examples: Sequence[TokenExample], config: TrainConfig, saved: Progress | None = None) -> EpochOrder:
    """The order of examples that all have one length of pieces, if they are pieces; see `order_of_run`.

    A grouped one takes seconds for a million examples, as their prompts are hashed.
    """
    groups = None
    if config.order == "grouped":
        keys = _prompts(examples) if config.group_by == PROMPT else column(examples, "group")
        groups = Groups.of_keys(config.group_by, keys, config.group_most)
    done = (0, 0) if saved is None else (saved.step, saved.examples)
    length = (config.seed, config.epochs, config.max_steps)
    if config.tokens_per_step is not None:
        sizes = column(examples, "plain_tokens").astype(np.int64)
        return EpochOrder.by_tokens(sizes, config.tokens_per_step, *length, *done, groups)
    return EpochOrder.plan(len(examples), config.examples_per_step, *length, *done, groups)


def _prompts(examples: Sequence[TokenExample]) -> np.ndarray:
    """uint64 [n]: what names each example's prompt; 0 for none, and for one of a single token: most likely a BOS, which
    documents and their first pieces all begin with, and which is nothing to share."""
    return np.where(column(examples, "prompt") > 1, column(examples, "prompt_hash"), np.uint64(0))


def doubts(examples: Sequence[TokenExample], config: TrainConfig, steps: int, share: Share = "tree") -> list[str]:
    """What of a run's settings cannot do what it is there for, with these examples and so many steps, in sentences."""
    found = []
    if config.order == "grouped" and share != "tree":
        found.append(
            f"train.order is grouped, but pack.share is {share}, with which examples have nothing in common in a pack: "
            "steps are less independent, and nothing is saved for it"
        )
    if config.tokens_per_step is not None:
        sizes = column(examples, "plain_tokens")
        if n := int((sizes > config.tokens_per_step).sum()):
            has, each = ("has", "it") if n == 1 else ("have", "each of them")
            found.append(
                f"train.tokens_per_step is {config.tokens_per_step:,}, but {counted(n, 'example')} {has} more tokens, "
                f"up to {int(sizes.max()):,}: {each} is a step of its own"
            )
    if config.warmup_steps is not None and config.warmup_steps >= steps:
        found.append(
            f"train.warmup_steps is {config.warmup_steps:,}, but the run has {counted(steps, 'step')}: the learning "
            "rate rises to the end and never falls"
        )
    return found


def compared_with(examples: Sequence[TokenExample], config: TrainConfig) -> dict[str, EpochOrder]:
    """The order that a run could have instead, by its name: shuffled; or grouped by prompt, if any two share one.

    Other groups than prompts are known only if the rows were read for them, see `asked_of_rows`.
    """
    if config.order == "grouped":
        return {"shuffled": order_of(examples, replace(config, order="shuffled"))}
    grouped = order_of(examples, replace(config, order="grouped", group_by=PROMPT))
    assert grouped.groups is not None
    return {} if grouped.groups.alone else {"grouped by prompt": grouped}
