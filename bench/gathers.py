"""How often FSDP gathers weights in a step, counted by the profiler's record of the host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tuningfork.models.policy import Policy


class Gathers:
    """Counts what this process gathers while in its context.

    It takes FSDP's own word for whose weights they are, so that what hosts tell each other, or tensor groups, is none
    of them. Nothing is compiled otherwise for it, as it would be below a mode that sees each operator.
    """

    def __init__(self) -> None:
        self.by_module: Counter[str] = Counter()  # the module's name in the model; "" for the model's own group
        self._profile = profile(activities=[ProfilerActivity.CPU], acc_events=True)

    def __enter__(self) -> Gathers:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.events():
            # private: torch by the name of its record around FSDP2's all-gather
            found = re.fullmatch(r"FSDP::all_gather(?: \((?P<module>[^)]*)\))?(?: \[.*\])?", event.name)
            if found is not None:
                self.by_module[found["module"] or ""] += 1

    def summary(self, blocks: Collection[str]) -> dict[str, int | float]:
        """`per_block`: the mean over these modules. `of_the_rest`: of all others together, embedding and head."""
        of_blocks = sum(self.by_module[name] for name in blocks)
        return {"per_block": of_blocks / len(blocks), "of_the_rest": self.by_module.total() - of_blocks}


def gathers_of(steps: Iterator[Any], policy: Policy) -> dict[str, int | float]:
    """The summary of the next step of a policy that is spread, and in how many `packs` this process has its examples.

    Raises StopIteration where there is no further step.
    """
    names = {module: name for name, module in policy.model.named_modules()}
    packs = 0

    def count(*_: Any) -> None:
        nonlocal packs
        packs += 1

    counting = policy.model.base_model.register_forward_pre_hook(count)
    try:
        with Gathers() as gathers:
            next(steps)
    finally:
        counting.remove()
    return {**gathers.summary([names[block] for block in policy.blocks]), "packs": packs}
