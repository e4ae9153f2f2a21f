"""What is known of the layers of our models with native sparse attention (models/nsa)."""

from __future__ import annotations

from torch import nn

from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.models.mixers.nsa import NsaLayer
from tuningfork.models.nsa.modeling_nsa import NsaAttention


def layers(model: nn.Module) -> list[NsaLayer]:
    """The layers of a model that have blocks, in their order; none in other families, and in dense twins."""
    return [
        _described(module) for module in model.modules() if isinstance(module, NsaAttention) and module.config.sparse
    ]


def _described(layer: NsaAttention) -> NsaLayer:
    config, groups = layer.config, layer.config.num_key_value_heads
    weights = [
        groups * weight[0].numel()  # of one group, or of all together: each multiplies with them
        for phi in (getattr(layer, "phi_k", None), getattr(layer, "phi_v", None))
        for weight in (getattr(phi, "inner", None), getattr(phi, "outer", None))
        if weight is not None
    ]
    return NsaLayer(
        heads=config.num_attention_heads,
        key_width=config.head_dim,
        value_width=config.value_head_dim,
        grid=Grid(config.block_length, config.block_stride, config.select_length),
        choice=Choice(config.select_count, config.select_initial, config.select_local),
        window=config.window,
        compression=sum(weights),
    )
