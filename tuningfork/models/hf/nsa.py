"""Models with native sparse attention, which are classes of ours (models/nsa) among transformers': what is known of
them, and the code that an export of one has beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.models import nsa
from tuningfork.models.mixers.nsa import NsaLayer
from tuningfork.models.nsa.modeling_nsa import NsaAttention

MODEL_TYPE: str = nsa.NsaConfig.model_type
_CODE = ("configuration_nsa.py", "modeling_nsa.py", "sequences_nsa.py")
_AUTO_MAP = {
    "AutoConfig": "configuration_nsa.NsaConfig",
    "AutoModel": "modeling_nsa.NsaModel",
    "AutoModelForCausalLM": "modeling_nsa.NsaForCausalLM",
}


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


def code_of(config: Any) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
    """Files that an export has so that transformers can read it without us, by name, and what config.json then says of
    them (auto_map); none for classes of transformers. They are ours, whatever lay in the starting folder."""
    if config.model_type != MODEL_TYPE:
        return {}, {}
    folder = Path(nsa.__file__).parent
    return {name: (folder / name).read_bytes() for name in _CODE}, _AUTO_MAP
