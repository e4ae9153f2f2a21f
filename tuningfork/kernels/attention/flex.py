"""Fork attention through FlexAttention: GPU, any float dtype up to 32 bits, soft-capping, no key gather.

Here the fork is a mask: a row sees the earlier rows of its own example that are prompt or its own answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tuningfork.records import ForkLayout

_compiled_flex = torch.compile(flex_attention, dynamic=False)
_compiled_mask = torch.compile(create_block_mask, dynamic=False)


class FlexAttention(NamedTuple):
    """One block mask for each attention window of the model."""

    masks: dict[int | None, BlockMask]

    @classmethod
    def prepare(cls, layout: ForkLayout, windows: frozenset[int | None]) -> FlexAttention:
        return cls({window: _block_mask(layout, window) for window in windows})

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))  # [1, H, T, d]

        def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        out = _compiled_flex(
            q,
            k,
            v,
            score_mod=cap if softcap is not None else None,
            block_mask=self.masks[window],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1).contiguous()


def _block_mask(layout: ForkLayout, window: int | None) -> BlockMask:
    example, answer, position = layout.example_of_row, layout.answer_of_row, layout.position_of_row
    rows = len(example)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        forked_from = (answer[j] == -1) | (answer[j] == answer[i])
        seen = (i >= j) & (example[i] == example[j]) & forked_from
        return seen if window is None else seen & (position[i] - position[j] < window)

    return _compiled_mask(visible, None, None, rows, rows, device=example.device)
