"""The element-wise parts of a decoder block, each written once over a kit: transformers', Liger's, or exact arithmetic.

A part takes and gives what it does in a training step: weights and residual stream are float32, as embeddings are;
products hand on the compute dtype. Where the block casts an output before its next use, for a product or for
attention, the cast belongs to the part. A norm of Qwen3's queries and keys hands float32 on to the rotary embedding.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tuningfork.models.policy import head_dim


class Family:
    """How one model shape writes its parts, and the sizes of its tensors."""

    def __init__(self, config: Any, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.rows = rows
        self.dtype = dtype
        self.device = device
        self.width = head_dim(config)
        self.heads = config.num_attention_heads * self.width
        self.key_heads = config.num_key_value_heads * self.width
        # OLMo2 norms what a branch gives, the others what a branch takes.
        self.norms_branches = config.model_type == "olmo2"

    @property
    def modeling(self) -> Any:
        """transformers' module with the model's code."""
        return importlib.import_module(type(self.config).__module__.replace("configuration_", "modeling_"))

    def module(self, name: str, *args: Any, **options: Any) -> nn.Module:
        """One of the model's own modules, such as Qwen3's RMSNorm."""
        kind = getattr(self.modeling, type(self.config).__name__.removesuffix("Config") + name)
        return kind(*args, **options).to(self.device)

    def norm(self, width: int) -> nn.Module:
        """A norm whose weights differ from 1, so that an error in them shows."""
        norm = self.module("RMSNorm", width, eps=self.config.rms_norm_eps)
        nn.init.uniform_(norm.weight, 0.5, 1.5)  # type: ignore[arg-type]
        return norm


class Transformers:
    """transformers' own modules and functions."""

    def __init__(self, family: Family) -> None:
        self.activation = ACT2FN[family.config.hidden_act]
        self.rotate = family.modeling.apply_rotary_pos_emb

    def norm(self, module: Any, x: Tensor) -> Tensor:
        return module(x)

    def add_norm(self, module: Any, residual: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + branch
        return total, self.norm(module, total)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate(q, k, cos, sin)


class Exact(Transformers):
    """The same formulas without a cast, so that float64 stays float64."""

    def norm(self, module: Any, x: Tensor) -> Tensor:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


class Liger(Transformers):
    """Liger's kernels where its patches put them; an addition stays PyTorch's.

    "gemma" multiplies by the weight before it casts, as OLMo2 does; Liger's own patch takes "llama" for OLMo2 too. Only
    where the patch for Llama allows it may the norm write its gradient over the one it was given.
    """

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.casting = "gemma" if family.norms_branches else "llama"

    def norm(self, module: Any, x: Tensor) -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        in_place = self.casting == "llama"
        return LigerRMSNormFunction.apply(x, module.weight, module.variance_epsilon, 0.0, self.casting, in_place, None)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(gate, up)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rope import LigerRopeFunction

        return LigerRopeFunction.apply(q, k, cos, sin)


class LigerFused(Liger):
    """Liger with the addition in the norm's kernel, which no patch uses; the kernel wants both terms in one dtype."""

    def add_norm(self, module: Any, residual: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        rest = (module.weight, module.variance_epsilon, 0.0, self.casting, False)
        normed, total = LigerFusedAddRMSNormFunction.apply(branch.to(residual.dtype), residual, *rest)
        return total, normed


class Part(nn.Module):
    """A part over one kit: `part(*part.inputs())` gives its outputs."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        self.dtype = family.dtype
        self.kit = Transformers(family)

    def using(self, kit: Callable[[Family], Transformers]) -> Self:
        """The same part over the same weights with another kit."""
        other = copy.copy(self)
        other.kit = kit(self.family)
        return other

    def exact(self) -> Self:
        """A copy that computes in float64."""
        other = copy.deepcopy(self).double()
        other.dtype, other.kit = torch.float64, Exact(self.family)
        return other

    def inputs(self) -> list[Tensor]:
        """Random inputs, [1, rows, ...] each; those that a gradient is taken of require one."""
        raise NotImplementedError

    def reread(self, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """What the backward pass must read beside the gradients of the outputs."""
        return inputs

    def _random(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(1, self.family.rows, width, device=self.family.device)
        return drawn.to(dtype or self.dtype).requires_grad_()


class Norm(Part):
    """A block's norm: of the residual stream for a product, or (OLMo2) of what a branch gives."""

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.rms = family.norm(family.config.hidden_size)

    def inputs(self) -> list[Tensor]:
        return [self._random(self.family.config.hidden_size, None if self.family.norms_branches else torch.float32)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.kit.norm(self.rms, x).to(self.dtype),)


class AddNorm(Part):
    """A branch added to the residual stream, the norm before or after; gives the sum and what a product reads of it."""

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.rms = family.norm(family.config.hidden_size)

    def inputs(self) -> list[Tensor]:
        hidden = self.family.config.hidden_size
        return [self._random(hidden, torch.float32), self._random(hidden)]

    def forward(self, residual: Tensor, branch: Tensor) -> tuple[Tensor, ...]:
        if self.family.norms_branches:
            total = residual + self.kit.norm(self.rms, branch)
            return total, total.to(self.dtype)
        total, normed = self.kit.add_norm(self.rms, residual, branch)
        return total, normed.to(self.dtype)

    def reread(self, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return [inputs[1] if self.family.norms_branches else outputs[0]]


class SwiGLU(Part):
    """silu(gate) · up."""

    def inputs(self) -> list[Tensor]:
        return [self._random(self.family.config.intermediate_size) for _ in range(2)]

    def forward(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (self.kit.swiglu(gate, up),)


class QkNorm(Part):
    """The norms of queries and keys: over each head (Qwen3), or over all heads together (OLMo2)."""

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        whole = family.norms_branches
        self.q_norm = family.norm(family.heads if whole else family.width)
        self.k_norm = family.norm(family.key_heads if whole else family.width)

    def inputs(self) -> list[Tensor]:
        return [self._random(self.family.heads), self._random(self.family.key_heads)]

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        if not self.family.norms_branches:
            q, k = (x.view(*x.shape[:-1], -1, self.family.width) for x in (q, k))
        return self.kit.norm(self.q_norm, q), self.kit.norm(self.k_norm, k)


class Rope(Part):
    """The rotary embedding of queries and keys; gives [rows, heads, width] in the compute dtype, as attention reads."""

    SEQUENCE = 2048  # tokens, after which positions begin again

    def inputs(self) -> list[Tensor]:
        family = self.family
        dtype = torch.float32 if family.config.model_type == "qwen3" else self.dtype
        positions = torch.arange(family.rows, device=family.device)[None] % self.SEQUENCE
        angles = family.module("RotaryEmbedding", family.config)
        cos, sin = angles(torch.empty(0, device=family.device), positions)
        return [self._random(family.heads, dtype), self._random(family.key_heads, dtype), cos, sin]

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k = (x.view(*x.shape[:-1], -1, self.family.width).transpose(1, 2) for x in (q, k))
        return tuple(x[0].transpose(0, 1).to(self.dtype) for x in self.kit.rope(q, k, cos, sin))

    def reread(self, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return inputs[2:]


PARTS: dict[str, type[Part]] = {"norm": Norm, "add_norm": AddNorm, "swiglu": SwiGLU, "qk_norm": QkNorm, "rope": Rope}


def parts(family: Family) -> dict[str, type[Part]]:
    """The parts that a block of this family has: Llama norms no queries and keys."""
    has_qk_norm = family.norms_branches or family.config.model_type == "qwen3"
    return {name: kind for name, kind in PARTS.items() if name != "qk_norm" or has_qk_norm}
