"""The policy: a transformers model as a backbone, with kernels, compiler and activation memory under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.fx.experimental._config  # private: torch.fx.experimental._config.use_duck_shape
import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuningfork.errors import ModelError
from tuningfork.kernels.select import Kernels, Sizes, plain, select
from tuningfork.kernels.sums import take
from tuningfork.models import activations, compiler
from tuningfork.models.embedding import repeat_gradients
from tuningfork.models.flops import FlopCounter
from tuningfork.models.hf import attention, ccgqa, gated_delta, short_conv
from tuningfork.models.hf.comparable import comparable
from tuningfork.models.hf.support import positions
from tuningfork.models.hf.watch import watch
from tuningfork.models.mixers.mixer import Mixer, Noting
from tuningfork.models.sink import Output
from tuningfork.models.split_k import running_without_split_k, without_split_k
from tuningfork.records import LogitTransform, PackedBatch

_HEAD_OPS: Mapping[str, Sizes] = {"row_logps": {}}


class Spread(Protocol):
    """How a policy's weights lie on several processes (distributed/sharding.py), and what it asks of that."""

    copies: int
    """Processes with packs of their own, whose gradients are added up."""

    def begin(self, last: bool) -> None:
        """Before a pack's forward pass. `last`: gradients travel with its backward pass, if it has one."""

    def run(self, **inputs: Any) -> Any:
        """What the backbone gives for these inputs."""

    def widened(self) -> AbstractContextManager[Any]:
        """Around passes in float32, backward ones too, of a model whose products are in fewer bits: its matrices may be
        gathered in those, and are widened then. Before blocks are compiled."""
        raise NotImplementedError

    def output(self) -> Output:
        """This process's part of the output projection, between `begin` and the backward pass."""
        raise NotImplementedError

    def exchange(self) -> None:
        """Behind the last backward pass of a step: gradients that have not travelled with it do so."""

    def squared_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The squared 2-norm of all gradients of the model, float64, on every process."""
        raise NotImplementedError

    def restart_clock(self) -> None:
        """Before a step: `forward_seconds` are those of its passes."""

    def forward_seconds(self) -> tuple[float, float]:
        """Of all forward passes since then: in which blocks computed, and in which they waited for weights."""
        raise NotImplementedError

    def release(self) -> None:
        """Behind passes without a backward pass: what was gathered is let go, and parameters are the spread ones again.

        Until then an optimizer, a checkpoint or a digest would meet gathered copies in their place.
        """


class Policy:
    """A model under training, or frozen: the backbone (backbone.py) of any class of transformers.

    Matrix products run in `dtype`, with `kernels` under its mixers. Weights are float32, or their matrices bfloat16
    (`hold_weights`); below float32 the model runs under autocast, since the two may meet.
    """

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels, dtype: torch.dtype, spread: Spread | None = None
    ) -> None:
        self.model = model
        self.config: Any = model.config
        self.kernels = kernels
        self.dtype = dtype
        self.transform = _logit_transform(self.config)
        self.compiled = False
        self.activation_memory = "none"  # see activations.py
        self.spread = spread  # over several processes
        self.noted: dict[str, Tensor] = {}  # what mixers note of the last pass, see Noting
        attention.patch(model)
        gated_delta.patch(model)
        short_conv.patch(model)
        ccgqa.patch(model)
        repeat_gradients(model)
        self._watched = watch(model, self._precision(), model.base_model if spread is None else spread.run)

    @classmethod
    def fast(cls, model: PreTrainedModel, dtype: torch.dtype, spread: Spread | None = None) -> Policy:
        """A policy with the best kernels for the device that the model is on."""
        policy = cls.plain(model, dtype, spread)
        policy.choose_kernels()
        return policy

    @classmethod
    def plain(cls, model: PreTrainedModel, dtype: torch.dtype, spread: Spread | None = None) -> Policy:
        """A policy with plain kernels, which every other is measured against. `spread`: how the model is spread."""
        policy = cls(model, plain(), dtype, spread)
        policy.kernels = plain(policy.ops)
        return policy

    def choose_kernels(self) -> None:
        """Take the best kernels for the device that the model is on."""
        self.kernels = select(self.ops, self.device, self.dtype)

    @property
    def has_plain_kernels(self) -> bool:
        return self.kernels == plain(self.kernels.forms)

    @property
    def ops(self) -> dict[str, Sizes]:
        """What its mixers and the head ask of kernels/."""
        return {op: sizes for ops in (*(mixer.ops for mixer in self.mixers), _HEAD_OPS) for op, sizes in ops.items()}

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
    def output(self) -> Output:
        """The output projection as this process has it; to be asked for anew with every pack."""
        return Output(self.head_weight, self.head_bias) if self.spread is None else self.spread.output()

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder blocks, in the order in which they first run. Raises ModelError where there are none."""
        if not self._watched.blocks:
            raise ModelError(f"{type(self.model).__name__}: no list of decoder blocks found.")
        return self._watched.blocks

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return self._watched.mixers

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def positions(self) -> int | None:
        return positions(self.config)

    def config_digest(self) -> str:
        """A content hash of what of the config decides the model's numbers."""
        return xxhash.xxh3_128_hexdigest(repr(sorted(comparable(self.config).items())).encode())

    def hidden_rows(self, batch: PackedBatch, last: bool = False) -> Tensor:
        """Final hidden states of the pack's logit rows, [R, D] in the compute dtype.

        Where weights are spread over processes, all of them must ask together. `last`: gradients travel with the
        backward pass that follows.
        """
        backbone: Any = self.model.base_model
        if self.spread is not None:
            self.spread.begin(last)
            backbone = self.spread.run
        prepared = {mixer.keyword: mixer.prepare(batch.layout, self.kernels) for mixer in self.mixers}
        with self._precision(), without_split_k(self.device, self.dtype):
            hidden = backbone(
                input_ids=batch.input_ids[None],
                position_ids=batch.layout.position_of_row[None],
                use_cache=False,
                **prepared,
            ).last_hidden_state[0]
        noting = [mixer for mixer in self.mixers if isinstance(mixer, Noting)]
        self.noted = {k: v for m in noting for k, v in m.noted(prepared[m.keyword], batch.spans).items()}
        return picked(hidden, batch.logit_rows).to(self.dtype)

    def _precision(self) -> AbstractContextManager[Any]:
        # A model without memory has no numbers to cast.
        if self.dtype in (torch.bfloat16, torch.float16) and self.device.type != "meta":
            return torch.autocast(self.device.type, self.dtype)
        return nullcontext() if self.spread is None else self.spread.widened()

    def compile(self) -> None:
        """Compile the decoder blocks, one by one: blocks of a kind share their code, so each kind compiles once.

        The number of rows is no constant of a graph, so packs need no padding up to a few static sizes.
        """
        # A graph for each kind of block, anew for every activation budget that is tried.
        # private: torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        # Sizes that happen to be equal, a table's length and its width, say, stay two. Otherwise a graph holds for such
        # packs alone, the next one gets another, and which of the two a pack meets is up to what came before it:
        # gradients of norms, sums over rows whose order a graph decides, would not repeat.
        # private: torch.fx.experimental._config.use_duck_shape
        torch.fx.experimental._config.use_duck_shape = False
        # Numbers that a layer has, its heads' width, say, are constants of a graph. Those of a module that FSDP manages
        # would not be: views of heads then have unknown shapes, and hardly anything around attention is fused.
        # private: torch._dynamo.config.specialize_int
        torch._dynamo.config.specialize_int = True
        self.compiled = True
        self.keep_activations(self.activation_memory)

    def keep_activations(self, mode: str) -> None:
        """From now on keep of each block what a mode of activations.py says. Numbers stay, memory and speed change.

        Raises:
            ConfigError: there is no such mode, or it needs compiled blocks and they are not.
        """
        activations.check_mode(mode, self.compiled)
        matrices = [weight for block in self.blocks for weight in block.parameters() if weight.ndim > 1]
        wide = all((weight.grad_dtype or weight.dtype) == torch.float32 for weight in matrices)
        compiling = activations.compiler(mode, compiler.options(self.device, wide))
        forwards = []
        for block in self.blocks:
            vars(block).pop("forward", None)  # the class's own is in force again
            forward: Any = block.forward
            if self.compiled:
                forward = torch.compile(forward, dynamic=True, **compiling)
            # A backward pass, which may compute the block again, is outside of what `hidden_rows` does.
            forwards.append(running_without_split_k(forward, self.device, self.dtype))
        # Not by transformers' own switch: depending on its version that recomputes inside the compiled block.
        for block, forward in zip(self.blocks, activations.keeping(mode, forwards), strict=True):
            block.forward = forward
        self.activation_memory = mode

    def check_runs(self) -> None:
        """Run two rows through the backbone, as when it was loaded. Raises ModelError where it does not run any more,
        for what its matrices were given."""
        watch(self.model, self._precision(), self.model.base_model)

    def flops(self) -> FlopCounter:
        """What a token costs in this model."""
        seen = self._watched
        return FlopCounter(seen.weights, self.head_weight.numel(), self.mixers, forward_only_weights=seen.forward_only)


def picked(hidden: Tensor, rows: Tensor) -> Tensor:
    """Rows [R] of hidden states [T, D], [R, D]. A row may be picked more than once, as the last one of a prompt is for
    the first token of each answer."""
    return take(hidden, rows)


def _logit_transform(config: Any) -> LogitTransform:
    scale = 1.0
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        scale *= config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite and MiniCPM divide, HyperCLOVA X multiplies
        scale = scale * config.logits_scaling if config.model_type == "hyperclovax" else scale / config.logits_scaling
    return LogitTransform(float(scale), getattr(config, "final_logit_softcapping", None))


def head_dim(config: Any) -> int:
    """Width of one attention head, of a config whose layers are all alike."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
