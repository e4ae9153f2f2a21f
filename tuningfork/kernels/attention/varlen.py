"""Fork attention through PyTorch's variable-length flash attention: GPU, bfloat16 or float16, no soft-capping."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tuningfork.records import ForkLayout

# Grouped key heads are an explicit argument from torch 2.13 on; before, the keys are repeated.
_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


class VarlenAttention(NamedTuple):
    """Segment borders and the key gather, all on the GPU. `max_seqlen` is a host int: kernels need it to launch."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    kv_index: Tensor | None
    max_seqlen: int

    @classmethod
    def prepare(cls, layout: ForkLayout, windows: frozenset[int | None]) -> VarlenAttention:
        return cls(layout.cu_seqlens_q, layout.cu_seqlens_k, layout.kv_index, layout.max_seqlen)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        assert softcap is None, "kernels.select never pairs varlen attention with soft-capping"
        if self.kv_index is not None:
            key, value = key.index_select(0, self.kv_index), value.index_select(0, self.kv_index)
        groups = query.shape[1] // key.shape[1]
        extra: dict[str, Any] = {}
        if groups > 1 and _HAS_GQA:
            extra["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        # (left, 0): causal, aligned to the bottom right; left counts the tokens before the query's own
        left = -1 if window is None else window - 1
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.max_seqlen,
            self.max_seqlen,
            scale=scale,
            window_size=(left, 0),
            **extra,
        )
        assert isinstance(out, Tensor)
        return out
