"""What is compiled or tuned in this process as it goes on: graphs of torch.compile, and kernels of Triton, whosever.

A run compiles in its first steps. What compiles later stops a step for seconds, and a kernel that is tuned anew for
each length of a pack can take more time than all training. So a run asks after every step what was compiled meanwhile
(train/late.py). Where nothing was, that costs a comparison: PyTorch and Triton tell of what they do as they do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch._dynamo.utils import get_compilation_metrics  # private: torch._dynamo.utils.get_compilation_metrics


@dataclass(frozen=True, slots=True)
class Compilation:
    """Something that was compiled, or tuned. `cause` says what asked for it, as far as that is known; else it is empty.

    One of a graph is the guard that failed; one of a kernel names the arguments that are others than before.
    `configurations`: how many were timed to tune a kernel of Triton.
    """

    what: str
    cause: str = ""
    configurations: int = 0

    def __str__(self) -> str:
        return f"{self.what}: {self.cause}" if self.cause else self.what


class Compilations:
    """Those of this process, each told once: by `taken`, from when this was made on.

    Of torch.compile no more than 64 are told at a time: so many it keeps.
    """

    def __init__(self) -> None:
        _listen_to_triton()
        self._last_graph: Any = None
        self._kernels = 0
        self.taken()

    def taken(self) -> list[Compilation]:
        """Those since the last call: graphs, and then kernels."""
        graphs: list[Compilation] = []
        known = get_compilation_metrics()
        for metrics in reversed(known):
            if metrics is self._last_graph:
                break
            graphs.append(_of_graph(metrics))
        self._last_graph = known[-1] if known else None
        kernels, self._kernels = _of_triton[self._kernels :], len(_of_triton)
        return [*reversed(graphs), *kernels]


def _of_graph(metrics: Any) -> Compilation:
    """From what PyTorch keeps of a compilation: `compile_id` is the same for a graph and its backward pass."""
    if metrics.is_runtime:
        return Compilation(f"kernels of graph {metrics.compile_id} were tuned")
    if metrics.is_forward is False:
        return Compilation(f"the backward pass of graph {metrics.compile_id} was compiled, which then first ran")
    where = f"{Path(metrics.co_filename or '').name}:{metrics.co_firstlineno}"
    return Compilation(
        f"graph {metrics.compile_id} of {metrics.co_name} ({where}) was compiled", metrics.recompile_reason or ""
    )


_of_triton: list[Compilation] = []
_forms: dict[Any, list[dict[str, str]]] = {}
"""Each kernel -> the arguments that it was compiled for, form by form."""


@cache
def _listen_to_triton() -> None:
    """From now on put what Triton compiles and tunes into `_of_triton`. Nothing, where there is no Triton."""
    try:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    # private: triton.knobs.runtime.jit_post_compile_hook
    others = knobs.runtime.jit_post_compile_hook

    def compiled(**told: Any) -> Any:
        _of_triton.append(_of_kernel(told["fn"].name, told["fn"].jit_function, told["compile"]))
        return None if others is None else others(**told)

    # private: triton.knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = compiled
    prune = Autotuner.prune_configs  # private: triton.Autotuner.prune_configs

    def tuning(self: Any, kwargs: Any) -> Any:
        """A tuner asks which of its configurations to time, once for every key that it has not met."""
        configs = prune(self, kwargs)
        if len(configs) > 1:
            _of_triton.append(_of_tuner(self, {**(self.nargs or {}), **kwargs}, len(configs)))
        return configs

    Autotuner.prune_configs = tuning  # private: triton.Autotuner.prune_configs


def _of_kernel(name: str, kernel: Any, told: Mapping[str, Any]) -> Compilation:
    form = dict(_arguments(told))
    known = _forms.setdefault(kernel, [])
    cause = "its first form"
    if known:
        nearest = min(known, key=lambda other: len(form.items() - other.items()))
        changed = [f"{argument} is {fact}" for argument, fact in form.items() if nearest.get(argument) != fact]
        cause = ", ".join(changed) or "no argument of it is another"
    known.append(form)
    return Compilation(f"kernel {name} was compiled", cause)


def _arguments(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a kernel was compiled for: (argument, its type or value), as Triton tells its hooks."""
    constants, (attributes,) = told["constants"], told["configs"]
    for place, (argument, kind) in enumerate(told["signature"].items()):
        if kind == "constexpr":
            yield argument, str(constants.get((place,)))
        elif any(name == "tt.divisibility" for name, _ in attributes.get((place,), ())):
            yield argument, f"{kind}, a multiple of 16"
        else:
            yield argument, str(kind)
    for option in ("num_warps", "num_stages", "num_ctas"):
        yield option, str(told[option])


def _of_tuner(tuner: Any, arguments: Mapping[str, Any], configs: int) -> Compilation:
    key = ", ".join(f"{name} {arguments[name]}" for name in tuner.keys if name in arguments)
    name = getattr(tuner.base_fn, "__name__", "?")
    cause = f"the first with {key}" if key else ""
    return Compilation(f"kernel {name} was tuned, {configs} configurations", cause, configs)
