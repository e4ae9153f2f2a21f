"""What is kept of a block's forward pass for its backward pass: the ways to trade memory for time.

    none      everything that the backward pass reads
    budget:x  a block's input, and the share x of what `none` keeps beyond it; the compiler recomputes the cheapest rest
    block     a block's input; the block is recomputed
    offload   the same, with the input in host memory meanwhile

No log-prob depends on the choice, and no gradient but by rounding: a budget lets the compiler fuse the backward pass
otherwise, and products that it recomputes may be cut as in any backward pass (split_k.py). What the others recompute is
computed by the same code from the same input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config  # private: torch._functorch.config
from torch.utils.checkpoint import checkpoint

from tuningfork.errors import ConfigError
from tuningfork.models.config import ACTIVATION_MEMORY, ACTIVATION_MEMORY_FORMS
from tuningfork.models.offload import Offload

Forward = Callable[..., Any]


def budget_of(mode: str) -> float | None:
    """The share that the compiler may keep; None where the mode is not the compiler's affair. Raises ConfigError."""
    if not re.fullmatch(ACTIVATION_MEMORY, mode):
        raise ConfigError(f"train.activation_memory is {mode!r}; allowed: {ACTIVATION_MEMORY_FORMS}.")
    name, _, share = mode.partition(":")
    return float(share) if name == "budget" else None


def check_mode(mode: str, compiled: bool) -> None:
    """Raises ConfigError where a mode is unknown, or needs compiled blocks and they are not."""
    if budget_of(mode) is not None and not compiled:
        raise ConfigError(
            f"train.activation_memory is {mode}, which the compiler carries out, but blocks are not compiled here. "
            "Set model.compile to on, or train.activation_memory to block."
        )


def keeping(mode: str, forwards: Sequence[Forward]) -> list[Forward]:
    """The blocks' forward functions, in their order, as a mode has them run.

    They are called as the blocks are, hidden states first; compiled ones stay compiled, since recomputation is put
    around them. `none` and budgets change nothing here: the latter are the business of `backend`.
    """
    if mode == "block":
        # Models with dropout are refused, so no random state needs to be put back.
        return [partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False) for run in forwards]
    if mode == "offload":
        offload = Offload()
        return [offload.around(run, first=place == 0) for place, run in enumerate(forwards)]
    if mode == "auto":
        raise ValueError("auto stands for another mode, which train/fit.py finds.")
    return list(forwards)


@dataclass(frozen=True)
class Budgeted:
    """The compiler's backend under a budget.

    The budget is a global of the compiler, read when a graph is compiled, which is when a block first runs. It is
    therefore set around each compilation, and only there. Backends with other budgets are unequal, so a block that
    comes with another one is compiled anew.
    """

    budget: float
    options: tuple[tuple[str, Any], ...]

    @property
    def __name__(self) -> str:  # how the compiler calls it in its messages
        return f"inductor with an activation budget of {self.budget}"

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx  # private: torch._inductor.compile_fx

        config: Any = torch._functorch.config  # private: torch._functorch.config
        changes: dict[str, Any] = {"activation_memory_budget": self.budget}
        # Otherwise operators that are not PyTorch's own, our attention, are taken for free to recompute.
        if hasattr(config, "is_non_builtin_to_include"):
            changes["is_non_builtin_to_include"] = True
        with config.patch(changes):
            return compile_fx(graph, inputs, config_patches=dict(self.options))


def compiler(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch.compile that carry out a mode, with inductor's `options`."""
    budget = budget_of(mode)
    if budget is None:
        return {"options": options}
    return {"backend": Budgeted(budget, tuple(sorted(options.items())))}
