"""One forward pass over two rows, watched: what a model really runs for a row, read off the model and not its config.

Configs name widths, windows and counts of layers in many ways, and not all of them: layers differ in the width of their
heads, share keys, or run several times in one pass. What runs is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch.utils._python_dispatch
from transformers import PreTrainedModel

from tuningfork.errors import LOADING, ModelError, OutOfMemory, enough_memory
from tuningfork.kernels.causal_conv.plain import Heads
from tuningfork.kernels.ccgqa.plain import Filters, QueryHeads
from tuningfork.models.hf import ccgqa, gated_delta, nsa, short_conv
from tuningfork.models.mixers.attention import KEYWORD, Attention, AttentionLayer
from tuningfork.models.mixers.ccgqa import Ccgqa, CcgqaLayer
from tuningfork.models.mixers.gated_delta import GatedDelta, GatedDeltaLayer, PreparedGatedDelta
from tuningfork.models.mixers.mixer import Mixer
from tuningfork.models.mixers.nsa import Nsa, NsaLayer, PreparedNsa
from tuningfork.models.mixers.short_conv import ShortConv, ShortConvLayer
from tuningfork.wording import first_line

_ROWS = 2  # one row would look like a step of generation


@dataclass
class Watched:
    """What ran.

    weights: of all matrix products, each as often as it is used for a row, not counting the head.
    forward_only: those of them that take no part in the backward pass.
    attention: its calls in their order; a layer that runs twice has two.
    gated_delta: the same of the gated delta rule; models of attention alone have none.
    short_conv: and of gated short convolutions.
    nsa: and of native sparse attention, whose windows are among attention's calls.
    ccgqa: and of what CCGQA does before its attention.
    blocks: the decoder blocks in the order of their first call: entries of lists of modules in which a mixer runs.
    """

    weights: int = 0
    forward_only: int = 0
    attention: list[AttentionLayer] = field(default_factory=list)
    gated_delta: list[GatedDeltaLayer] = field(default_factory=list)
    short_conv: list[ShortConvLayer] = field(default_factory=list)
    nsa: list[NsaLayer] = field(default_factory=list)
    ccgqa: list[CcgqaLayer] = field(default_factory=list)
    blocks: list[nn.Module] = field(default_factory=list)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        recurrent = (GatedDelta(tuple(self.gated_delta)),) if self.gated_delta else ()
        convolutions = (ShortConv(tuple(self.short_conv)),) if self.short_conv else ()
        sparse = (Nsa(tuple(self.nsa)),) if self.nsa else ()
        compressed = (Ccgqa(tuple(self.ccgqa)),) if self.ccgqa else ()
        return (Attention(tuple(self.attention)), *recurrent, *convolutions, *compressed, *sparse)


def watch(model: PreTrainedModel, precision: AbstractContextManager[Any], run: Callable[..., Any]) -> Watched:
    """Run the model once under a context of precision, with mixers that only look on. Nothing of it changes.

    `run` runs its backbone, which is gathered for it where the model is spread over processes.

    Raises:
        ModelError: the model does not run, or none of its attention reaches ours.
    """
    seen = Watched()
    ids = torch.zeros(1, _ROWS, dtype=torch.long, device=next(model.parameters()).device)
    fork = _Onlooker(seen)
    told: dict[str, Any] = {KEYWORD: fork}
    if gated_delta.layers(model):
        told[gated_delta.KEYWORD] = PreparedGatedDelta(conv=fork, scan=fork)
    if short_conv.layers(model):
        told[short_conv.KEYWORD] = fork
    if sparse := nsa.layers(model):
        told[Nsa.keyword] = PreparedNsa(fork)
        seen.nsa = sparse
    if ccgqa.layers(model):
        told[ccgqa.KEYWORD] = fork
    where = f"{model.name_or_path}: " if model.name_or_path else ""
    kind = type(model).__name__
    try:
        memory = enough_memory("watching the model", LOADING)
        with memory, torch.enable_grad(), precision, _blocks(model, fork), _Products(seen):
            positions = torch.arange(_ROWS, device=ids.device)[None]
            run(input_ids=ids, position_ids=positions, use_cache=False, **told)
    except ModelError as error:
        raise ModelError(f"{where}{error}") from error
    except OutOfMemory:
        raise
    except Exception as error:
        raise ModelError(
            f"{where}{kind} does not run with packed attention ({first_line(error)}). Not supported."
        ) from error
    if not seen.attention:
        raise ModelError(f"{where}{kind} runs, but attention of its layers cannot be replaced. Not supported.")
    return seen


class _Onlooker:
    """Stands for what mixers prepare: notes the call, and gives zeros of the right shape."""

    def __init__(self, seen: Watched) -> None:
        self._seen = seen
        self.inside: list[nn.Module] = []  # entries of module lists that are running, the outermost first

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, **more: Any) -> Tensor:
        _, heads, width = query.shape
        value_width = value.shape[-1]
        widths = heads * (width + value_width) // 2, max(width, value_width)
        self._seen.attention.append(AttentionLayer(widths[0], window, widths[1], backward=torch.is_grad_enabled()))
        self._note_block()
        return query.new_zeros(*query.shape[:2], value_width)

    def query_key_value(self, x: Tensor, weight: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        layer = GatedDeltaLayer(heads, weight.shape[1], backward=torch.is_grad_enabled())
        self._seen.gated_delta.append(layer)
        self._note_block()
        keys = (len(x), heads.keys, heads.key_width)
        return x.new_zeros(keys), x.new_zeros(keys), x.new_zeros(len(x), heads.values, heads.value_width)

    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return torch.zeros_like(value)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = True) -> Tensor:
        self._seen.short_conv.append(ShortConvLayer(weight.shape[0], weight.shape[1], torch.is_grad_enabled()))
        self._note_block()
        return torch.zeros_like(x)

    @property
    def first_positions(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long)

    def blocks(self, rows: Tensor) -> Tensor:
        length = self._seen.nsa[0].grid.length
        return rows.new_zeros(1, length, *rows.shape[1:])

    def mean(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows[:1])

    def compressed(self, query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return query.new_zeros(*query.shape[:2], values.shape[2]), query.new_zeros(len(query), 0, 0)

    def selected(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, **how: Any) -> Tensor:
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def query_key(self, x: Tensor, filters: Filters, temperature: Tensor, heads: QueryHeads) -> tuple[Tensor, Tensor]:
        taps = filters.depthwise.shape[1], filters.grouped.shape[2]
        self._seen.ccgqa.append(CcgqaLayer(heads, *taps, backward=torch.is_grad_enabled()))
        self._note_block()
        return x.new_zeros(len(x), heads.queries, heads.width), x.new_zeros(len(x), heads.keys, heads.width)

    def values(self, x: Tensor, now: int) -> Tensor:
        return torch.zeros_like(x)

    def _note_block(self) -> None:
        if self.inside and not any(self.inside[0] is block for block in self._seen.blocks):
            self._seen.blocks.append(self.inside[0])


class _Products(TorchDispatchMode):
    """Adds up the weights of matrix products. Mixers' own are not among them: they only look on."""

    def __init__(self, seen: Watched) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [t for t in args if isinstance(t, Tensor)][-2:]
            weights = a.shape[0] * a.shape[1] * b.shape[1] // _ROWS
            self._seen.weights += weights
            if not torch.is_grad_enabled():
                self._seen.forward_only += weights
        return func(*args, **(kwargs or {}))


@contextmanager
def _blocks(model: PreTrainedModel, fork: _Onlooker) -> Iterator[None]:
    """Tell the onlooker which entries of module lists are running, each with its class's own forward."""

    def enter(module: nn.Module, _: Any) -> None:
        fork.inside.append(module)

    def leave(*_: Any) -> None:  # what a hook returns would take the place of what its module does
        fork.inside.pop()

    lists = [modules for modules in model.base_model.modules() if isinstance(modules, nn.ModuleList)]
    entries = [entry for modules in lists for entry in modules]
    replaced = [(entry, vars(entry).pop("forward")) for entry in entries if "forward" in vars(entry)]
    hooks = [entry.register_forward_pre_hook(enter) for entry in entries]
    hooks += [entry.register_forward_hook(leave) for entry in entries]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for entry, forward in replaced:
            entry.forward = forward
