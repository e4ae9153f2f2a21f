"""Compressed convolutional grouped-query attention (CCGQA; Figliolia et al. 2025, arXiv:2510.04476), in plain PyTorch.

Attention happens in a latent space that is C1 times narrower than the hidden states for queries and C2 times for keys
and values. Before it, queries and keys go through two short causal convolutions, and half of the values are those of
the token before.

This file needs torch and transformers alone: an exported model carries a copy of it, with which
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads it anywhere. It is written to be read, not
to be fast. Training puts other layers in the place of CcgqaAttention, which compute the same from packs of examples.

Every token reads the tokens of its own sequence alone, told by their positions: of rows that begin at position 0 anew,
as packing without a mask has them, none reads one of a sequence before it. There is no cache of keys and values.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

_OF_THE_LIBRARY = {
    *("attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path", "num_labels"),
    *("output_attentions", "torch_dtype", "transformers_version"),
}
"""What transformers itself gives to a config beside its fields, and beside names that begin with an underscore."""
_HARMLESS = {"cache_position", "num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict"}
"""What transformers may hand to a model, and says nothing of which token sees which."""


class CcgqaConfig(PreTrainedConfig):
    """Sizes of a CCGQA decoder. Latent queries have num_attention_heads * head_dim channels, latent keys and values
    num_key_value_heads * head_dim each.

    depthwise_kernel_size, grouped_kernel_size: tokens that the first and the second convolution read, with the token
        itself; conv_bias: whether they have biases.
    value_shift: where values are cut into those of the token and those of the token before. `heads` leaves heads whole,
        so num_key_value_heads must be even; `channels` cuts in the middle, through a head if it must.
    rotary_fraction: of each head's channels, the first ones, that are rotated by position.
    recursions: times that a block's MLP runs in a row, each with an offset of its own before its norm.
    residual_scale: of what attention adds to the hidden states; embedding_scale: of the embeddings.

    Raises:
        ValueError: a setting is unknown, or sizes do not fit each other.
    """

    model_type = "tuningfork_ccgqa"

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    depthwise_kernel_size: int = 2
    grouped_kernel_size: int = 2
    conv_bias: bool = True
    value_shift: str = "heads"
    rotary_fraction: float = 1.0
    rope_theta: float = 10_000.0
    recursions: int = 1
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    use_cache: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **more: Any) -> None:
        known = {field.name for field in fields(self)}
        for name in more:
            if name not in known | _OF_THE_LIBRARY and not name.startswith("_"):
                near = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{name} is no setting of a {self.model_type} model{hint}")
        super().__post_init__(**more)
        self._check()

    def _check(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be a number, 0 or more")
        for name in ("conv_bias", "tie_word_embeddings"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        heads, keys, width = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if heads % keys:
            raise ValueError(
                f"num_attention_heads is {heads} and num_key_value_heads {keys}: the first must be a multiple of the "
                "second, so that each key head is shared by as many query heads"
            )
        rotated = width * self.rotary_fraction
        if not 0 <= rotated <= width or rotated != int(rotated) or int(rotated) % 2:
            raise ValueError(
                f"head_dim is {width} and rotary_fraction {self.rotary_fraction}: {rotated:g} channels of a head would "
                f"be rotated, which must be an even number from 0 to {width}"
            )
        if self.value_shift not in ("heads", "channels"):
            raise ValueError(f"value_shift is {self.value_shift!r}; it must be heads or channels")
        if self.value_shift == "heads" and keys % 2:
            raise ValueError(
                f"num_key_value_heads is {keys}, and value_shift heads gives half of them to the token before: make it "
                "even, or set value_shift to channels, which cuts through a head"
            )
        if keys * width % 2:
            raise ValueError(
                f"num_key_value_heads is {keys} and head_dim {width}: their product, {keys * width} channels of "
                "values, must be even, for half of them are those of the token before"
            )
        if self.use_cache:
            raise ValueError("use_cache is true: this model has no cache of keys and values")


_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "depthwise_kernel_size", "grouped_kernel_size", "recursions"),
    "max_position_embeddings",
)
_NUMBERS = (
    *("rotary_fraction", "rope_theta", "residual_scale", "embedding_scale", "rms_norm_eps", "initializer_range"),
)


class CcgqaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same; the mean is taken in float32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class CcgqaAttention(nn.Module):
    def __init__(self, config: CcgqaConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        channels = queries + keys
        self.now = keys // 2  # channels of values that are the token's own
        self.qk_proj = nn.Linear(config.hidden_size, channels, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        # As torch's Conv1d has them, but for an empty dimension: the last tap is multiplied with the token itself.
        self.depthwise_weight = nn.Parameter(torch.empty(channels, config.depthwise_kernel_size))
        self.grouped_weight = nn.Parameter(torch.empty(channels, self.head_dim, config.grouped_kernel_size))
        bias = torch.zeros(channels) if config.conv_bias else None
        self.depthwise_bias = None if bias is None else nn.Parameter(bias)
        self.grouped_bias = None if bias is None else nn.Parameter(bias.clone())
        self.temperature = nn.Parameter(torch.zeros(self.key_heads))  # of keys, in logarithms

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], positions: Tensor, visible: Tensor) -> Tensor:
        """x [B, N, D] at positions [B, N], with visible [B, N, N], which token sees which -> [B, N, D]."""
        query, key, value = self.latent(x, positions)
        query, key = (rotated(heads, *rotation) for heads in (query, key))
        query, key, value = (heads.transpose(1, 2) for heads in (query.to(value.dtype), key.to(value.dtype), value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def latent(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, D] -> queries [B, N, heads, head_dim], keys and values [B, N, key_heads, head_dim]; norms and sums in
        float32 at least."""
        latent, values = self.qk_proj(x), self.v_proj(x)
        wide = torch.promote_types(latent.dtype, torch.float32)
        least = torch.finfo(latent.dtype).eps
        query, key = self._by_head(self._convolved(latent, positions).to(wide))
        query_mean, key_mean = self._means(latent.to(wide))
        query, key = unit(query + query_mean, least), unit(key + key_mean, least)
        key = key * self.temperature.to(wide).exp()[:, None]
        before = earlier(values[..., self.now :], 1, positions)
        value = torch.cat([values[..., : self.now], before], dim=-1).unflatten(-1, (-1, self.head_dim))
        return query.to(latent.dtype), key.to(latent.dtype), value

    def _convolved(self, latent: Tensor, positions: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]: each channel by itself, then the channels of each head. Before a sequence there are
        zeros, of which the first convolution makes its bias; they are put there once, before both."""
        wide = torch.promote_types(latent.dtype, torch.float32)
        first, second = self.depthwise_weight.to(wide), self.grouped_weight.unflatten(0, (-1, self.head_dim))
        zeros = latent.new_zeros(latent.shape[-1])
        bias = zeros if self.depthwise_bias is None else self.depthwise_bias
        by_channel = bias.to(wide)
        for back in range(first.shape[-1]):
            by_channel = by_channel + first[:, -1 - back] * earlier(latent, back, positions).to(wide)
        by_channel = by_channel.to(latent.dtype)
        mixed = (zeros if self.grouped_bias is None else self.grouped_bias).to(wide).unflatten(0, (-1, self.head_dim))
        for back in range(second.shape[-1]):
            there = earlier(by_channel, back, positions, bias.to(latent.dtype)).unflatten(-1, (-1, self.head_dim))
            weight = second[..., -1 - back].to(latent.dtype)
            mixed = mixed + torch.einsum("...hi,hoi->...ho", there.to(wide), weight.to(wide))
        return mixed.flatten(-2)

    def _means(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to queries: the mean of a query head and its key head, before the convolutions. And to keys:
        the mean of that over the query heads of a key head."""
        query, key = self._by_head(latent)
        group = self.heads // self.key_heads
        mean = (query + key.repeat_interleave(group, dim=-2)) / 2
        return mean, mean.unflatten(-2, (-1, group)).mean(-2)

    def _by_head(self, channels: Tensor) -> tuple[Tensor, Tensor]:
        return channels.unflatten(-1, (-1, self.head_dim)).split([self.heads, self.key_heads], dim=-2)


def earlier(x: Tensor, back: int, positions: Tensor, fill: Tensor | None = None) -> Tensor:
    """x [B, N, C] of the token so many before each in its sequence; where there is none, `fill` [C] or zeros."""
    if back == 0:
        return x
    shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
    there = (positions >= back) & (torch.arange(x.shape[1], device=x.device) >= back)
    return torch.where(there[..., None], shifted, x.new_zeros(x.shape[-1]) if fill is None else fill)


def unit(heads: Tensor, least: float) -> Tensor:
    """[..., d], each head brought to a length of sqrt(d); one shorter than `least` is multiplied as if it had that."""
    norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True).clamp(min=least)
    return heads * (heads.shape[-1] ** 0.5 / norm)


def rotation_of(positions: Tensor, config: CcgqaConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, N, rotated channels / 2] of tokens at positions [B, N]; angles are float32."""
    rotated = int(config.head_dim * config.rotary_fraction)
    each = torch.arange(0, rotated, 2, device=positions.device, dtype=torch.float32) / max(rotated, 1)
    angles = positions[..., None].float() * config.rope_theta**-each
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., H, d] with the first 2 * half channels rotated, channel i with channel half + i; cos, sin [..., half]."""
    half = cos.shape[-1]
    one, other, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest.to(cos.dtype)], dim=-1)


class CcgqaMLP(nn.Module):
    def __init__(self, config: CcgqaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CcgqaDecoderLayer(nn.Module):
    def __init__(self, config: CcgqaConfig) -> None:
        super().__init__()
        self.self_attn = CcgqaAttention(config)
        self.mlp = CcgqaMLP(config)
        self.input_layernorm = CcgqaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CcgqaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recursions, self.residual_scale = config.recursions, config.residual_scale
        several = config.recursions > 1
        self.offsets = nn.Parameter(torch.zeros(config.recursions, config.hidden_size)) if several else None

    def forward(self, x: Tensor, **of_attention: Any) -> Tensor:
        x = x + self.residual_scale * self.self_attn(self.input_layernorm(x), **of_attention)
        for time in range(self.recursions):
            moved = x if self.offsets is None else x + self.offsets[time]
            x = x + self.mlp(self.post_attention_layernorm(moved))
        return x


class CcgqaPreTrainedModel(PreTrainedModel):
    config: CcgqaConfig
    config_class = CcgqaConfig
    base_model_prefix = "model"
    _no_split_modules = ["CcgqaDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CcgqaAttention):  # as torch starts a convolution, but without biases
            for weight in (module.depthwise_weight, module.grouped_weight):
                bound = weight[0].numel() ** -0.5
                init.uniform_(weight, -bound, bound)
            for vector in (module.depthwise_bias, module.grouped_bias, module.temperature):
                if vector is not None:
                    init.zeros_(vector)
        if isinstance(module, CcgqaDecoderLayer) and module.offsets is not None:
            init.zeros_(module.offsets)


class CcgqaModel(CcgqaPreTrainedModel):
    def __init__(self, config: CcgqaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([CcgqaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = CcgqaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, N, D] of ids [B, N].

        attention_mask: [B, N], 0 for padding, which may be on the left or on the right.
        position_ids: [B, N]; by default tokens are counted from 0.
        more: what layers that are put in the place of CcgqaAttention are told of a pack.

        Raises:
            ValueError: a cache is asked for, a mask has holes, or there is what would change which token sees which.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        if use_cache or more.pop("past_key_values", None) is not None or more.pop("cache", None) is not None:
            raise ValueError("a CCGQA model has no cache of keys and values: call it with use_cache=False")
        told = {name: value for name, value in more.items() if value is not None and name not in _HARMLESS}
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * self.config.embedding_scale
        if position_ids is None:
            position_ids = _counted(attention_mask, x)
        rotation = rotation_of(position_ids, self.config, x.dtype)
        if not told:
            told = {"positions": position_ids, "visible": _visible(position_ids)}
        for layer in self.layers:
            x = layer(x, rotation=rotation, **told)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


def _counted(mask: Tensor | None, x: Tensor) -> Tensor:
    """Positions [B, N], counted from each row's first token that is no padding."""
    if mask is None:
        return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    if mask.ndim != 2:
        raise ValueError(f"attention_mask has {mask.ndim} dimensions; give [batch, tokens], 0 for padding")
    kept = mask.bool()
    if (kept[:, 0].long() + (kept[:, 1:] & ~kept[:, :-1]).sum(1) > 1).any():
        raise ValueError("attention_mask has padding between tokens; it may be on one side or on both")
    return (kept.long().cumsum(1) - 1).clamp(min=0)


def _visible(positions: Tensor) -> Tensor:
    """bool [B, N, N]: each token sees itself and those before it in its sequence."""
    place = torch.arange(positions.shape[1], device=positions.device)
    back = place[:, None] - place
    return (back >= 0) & (back <= positions[..., None])


class CcgqaForCausalLM(CcgqaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: CcgqaConfig) -> None:
        super().__init__(config)
        self.model = CcgqaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, logits_to_keep: int = 0, **more: Any
    ) -> CausalLMOutputWithPast:
        """Logits [B, N, V], of the last `logits_to_keep` tokens or of all; with labels [B, N] the mean loss, too."""
        hidden = self.model(input_ids=input_ids, **more).last_hidden_state
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def generate(self, *args: Any, **more: Any) -> Any:
        """As every model of transformers generates, each token from the whole sequence: there is no cache."""
        return super().generate(*args, **{"use_cache": False, **more})
