"""The policy: a transformers model that runs packs and hands out the hidden states of logit rows."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuningfork.errors import ModelError
from tuningfork.kernels.select import Kernels, plain, select
from tuningfork.models import activations, compiler
from tuningfork.models.flops import FlopCounter
from tuningfork.records import LogitTransform, PackedBatch


class Policy:
    """A model under training, or frozen.

    Matrix products run in `dtype`, with `kernels` under the attention interface. Weights are float32, or their matrices
    bfloat16 (`hold_weights`); below float32 the model runs under autocast, since the two may meet.
    """

    def __init__(self, model: PreTrainedModel, kernels: Kernels, dtype: torch.dtype) -> None:
        self.model = model
        self.config: Any = model.config
        self.kernels = kernels
        self.dtype = dtype
        self.transform = _logit_transform(self.config)
        self.layer_windows = _windows(model)
        self.compiled = False
        self.activation_memory = "none"  # see activations.py

    @classmethod
    def fast(cls, model: PreTrainedModel, dtype: torch.dtype) -> Policy:
        """A policy with the best kernels for the device that the model is on."""
        device = next(model.parameters()).device
        return cls(model, select(device, dtype, head_dim(model.config)), dtype)

    @classmethod
    def plain(cls, model: PreTrainedModel, dtype: torch.dtype) -> Policy:
        """A policy with plain kernels, which every other is measured against."""
        return cls(model, plain(), dtype)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def head_weight(self) -> nn.Parameter:
        """The output embedding [V, D]; the input embedding itself where a model ties them."""
        return self.model.get_output_embeddings().weight  # type: ignore[operator]

    @property
    def head_bias(self) -> nn.Parameter | None:
        """What the model adds to its raw logits, [V]; most add nothing."""
        return getattr(self.model.get_output_embeddings(), "bias", None)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks."""
        count = self.config.num_hidden_layers
        lists = [m for m in self.model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if not lists:
            raise ModelError(f"{type(self.model).__name__}: no list of {count} decoder blocks found.")
        return lists[0]

    def hidden_rows(self, batch: PackedBatch) -> Tensor:
        """Final hidden states of the pack's logit rows, [R, D] in the compute dtype."""
        fork = self.kernels.attention.prepare(batch.layout)  # type: ignore[attr-defined]
        precision: Any = nullcontext()
        if self.dtype == torch.bfloat16:
            precision = torch.autocast(self.device.type, self.dtype)
        with precision:
            hidden = self.model.base_model(
                input_ids=batch.input_ids[None],
                position_ids=batch.layout.position_of_row[None],
                use_cache=False,
                fork=fork,
            ).last_hidden_state[0]
        return hidden.index_select(0, batch.logit_rows).to(self.dtype)

    def compile(self) -> None:
        """Compile the decoder blocks, one by one: blocks of a kind share their code, so each kind compiles once.

        The number of rows is no constant of a graph, so packs need no padding up to a few static sizes. The compiler
        may still make a second graph for small packs, whose backward pass it fuses otherwise.
        """
        # A graph for each kind of block, and one more where a size lets the compiler fuse otherwise; each of them anew
        # for every activation budget that is tried.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self.compiled = True
        self.keep_activations(self.activation_memory)

    def keep_activations(self, mode: str) -> None:
        """From now on keep of each block what a mode of activations.py says. Numbers stay, memory and speed change.

        Raises:
            ConfigError: there is no such mode, or it needs compiled blocks and they are not.
        """
        activations.check(mode, self.compiled)
        compiling = activations.compiler(mode, compiler.options(self.device))
        forwards = []
        for block in self.blocks:
            vars(block).pop("forward", None)  # the class's own is in force again
            forward: Any = block.forward
            if self.compiled:
                forward = torch.compile(forward, dynamic=True, **compiling)
            forwards.append(forward)
        # Not by transformers' own switch: depending on its version that recomputes inside the compiled block.
        for block, forward in zip(self.blocks, activations.keeping(mode, forwards), strict=True):
            block.forward = forward
        self.activation_memory = mode

    def flops(self) -> FlopCounter:
        """What a token costs in this model."""
        config = self.config
        # nn.Linear and GPT-2's Conv1D both hold a two-dimensional weight; embeddings and norms are no products.
        weights = sum(
            weight.numel()
            for module in self.blocks.modules()
            for weight in module.parameters(recurse=False)
            if weight.ndim == 2 and not isinstance(module, nn.Embedding)
        )
        width = config.num_attention_heads * head_dim(config)
        return FlopCounter(weights, self.head_weight.numel(), tuple((width, w) for w in self.layer_windows))


def graphs_compiled() -> int:
    """Graphs that the compiler has made in this process so far; each gets its backward pass when it is first needed."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _logit_transform(config: Any) -> LogitTransform:
    scale = 1.0
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        scale *= config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale /= config.logits_scaling
    return LogitTransform(float(scale), getattr(config, "final_logit_softcapping", None))


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _windows(model: PreTrainedModel) -> list[int | None]:
    """The attention window of each layer; None sees the whole sequence."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    # Converted configs carry the key for families whose code never reads it.
    reads_it = "sliding_window" in inspect.getsource(sys.modules[type(model).__module__])
    if not reads_it or not getattr(config, "use_sliding_window", True):
        window = None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]
