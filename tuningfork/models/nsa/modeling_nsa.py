"""Native sparse attention (Yuan et al. 2025, arXiv:2502.11089) as a language model of transformers.

This file and those beside it need torch and transformers, and nothing else: an exported model has copies of them beside
its weights, so that ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` reads it anywhere.

A layer reads its path through three branches, each with keys and values of its own (rows are tokens):

    compressed   blocks of `block_length` positions, one each `block_stride`, each made one key and one value (`phi`)
    selected     the rows of the `select_count` blocks of `select_length` positions that compressed attention favours
    window       the last `window` rows

and adds them up, each times a gate of its own for each head. What these run on, a layer is handed: `fork` for the
window and `nsa` for the other two. Sequences side by side (sequences_nsa.py) are the readable form of both. There is
no cache: each token that is generated comes from the whole sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from .configuration_nsa import NsaConfig
from .sequences_nsa import NsaChoice, NsaSequences


class NsaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class NsaCompression(nn.Module):
    """phi: the rows of a block [E, l, G, w], side by side, become one, [E, G, w]; each group by weights of its own."""

    def __init__(self, config: NsaConfig, width: int, positions: bool) -> None:
        super().__init__()
        groups = 1 if config.phi_shared else config.num_key_value_heads
        whole, hidden = config.block_length * width, config.phi_hidden or 2 * width
        self.inner = nn.Parameter(torch.empty(groups, hidden, whole)) if config.phi == "mlp" else None
        self.outer = nn.Parameter(torch.empty(groups, width, whole if self.inner is None else hidden))
        self.positions = nn.Parameter(torch.empty(config.block_length, groups, width)) if positions else None

    def forward(self, blocks: Tensor) -> Tensor:
        if self.positions is not None:
            blocks = blocks + self.positions.to(blocks.dtype)
        x = blocks.permute(2, 0, 1, 3).flatten(2)  # [G, E, l w]
        if self.inner is not None:
            x = F.silu(_products(x, self.inner))
        return _products(x, self.outer).transpose(0, 1)


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x [G, E, in] with each group's weights [G, out, in], or with those of all, [1, out, in]."""
    return torch.bmm(x, weight.to(x.dtype).expand(len(x), -1, -1).mT)


class NsaGates(nn.Linear):
    """The last layer of the gates, which begins at zero: each gate at one half."""


class NsaAttention(nn.Module):
    def __init__(self, config: NsaConfig) -> None:
        super().__init__()
        self.config = config
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.scale = config.head_dim**-0.5
        self.choice = NsaChoice(config.select_count, config.select_initial, config.select_local)
        self.branches = ("cmp", "slc", "win") if config.sparse else ("full",)
        self.q_proj = nn.Linear(size, heads * config.head_dim, bias=False)
        for branch in self.branches:  # independent, which is the paper's means against short cuts in learning
            self.add_module(f"k_{branch}", nn.Linear(size, groups * config.head_dim, bias=False))
            self.add_module(f"v_{branch}", nn.Linear(size, groups * config.value_head_dim, bias=False))
        self.o_proj = nn.Linear(heads * config.value_head_dim, size, bias=False)
        if config.sparse and config.phi != "mean":
            self.phi_k = NsaCompression(config, config.head_dim, positions=True)
            self.phi_v = NsaCompression(config, config.value_head_dim, positions=config.pe_values)
        if config.sparse:
            self.gate_hidden = nn.Linear(size, config.gate_hidden) if config.gate_hidden else None
            self.gate = NsaGates(config.gate_hidden or size, 3 * heads)

    def forward(self, x: Tensor, turn: NsaTurn, fork: Any, nsa: Any) -> Tensor:
        """Rows [T, D] -> [T, D]. What each row's gates are is left in `nsa.gates` [T, 4], if it is there (`_noted`)."""
        config = self.config
        raw = self.q_proj(x).unflatten(-1, (-1, config.head_dim))
        query = turn.rows(raw)
        keys = {b: getattr(self, f"k_{b}")(x).unflatten(-1, (-1, config.head_dim)) for b in self.branches}
        values = {b: getattr(self, f"v_{b}")(x).unflatten(-1, (-1, config.value_head_dim)) for b in self.branches}
        if not config.sparse:
            out = fork.attend(
                query, turn.rows(keys["full"]), values["full"], scale=self.scale, window=None, softcap=None
            )
            return self.o_proj(out.flatten(1))

        if config.cmp_rope == "before":
            keys["cmp"] = turn.rows(keys["cmp"])
        made = [self._pooled(nsa.ops, keys["cmp"], "phi_k"), self._pooled(nsa.ops, values["cmp"], "phi_v")]
        if config.cmp_rope == "block_start":
            made[0] = turn.blocks(made[0])
        asked = raw if config.cmp_rope == "none" else query
        compressed, chosen = nsa.ops.compressed(asked, *made, scale=self.scale, choice=self.choice)
        selected = nsa.ops.selected(query, turn.rows(keys["slc"]), values["slc"], chosen, scale=self.scale)
        window = fork.attend(
            query, turn.rows(keys["win"]), values["win"], scale=self.scale, window=config.window, softcap=None
        )
        gates = self._gates(x).unflatten(-1, (-1, 3, 1))  # [T, H, 3, 1]
        if nsa.gates is not None:
            nsa.gates.copy_(_noted(gates.detach()[..., 0]))
        out = gates[:, :, 0] * compressed + gates[:, :, 1] * selected + gates[:, :, 2] * window
        return self.o_proj(out.flatten(1))

    def _pooled(self, ops: Any, rows: Tensor, phi: str) -> Tensor:
        return ops.mean(rows) if self.config.phi == "mean" else getattr(self, phi)(ops.blocks(rows))

    def _gates(self, x: Tensor) -> Tensor:
        """[T, 3 H], of each head those of the compressed branch, the selected one and the window."""
        if self.gate_hidden is not None:
            x = F.silu(self.gate_hidden(x))
        return self.gate(x).sigmoid()


def _noted(gates: Tensor) -> Tensor:
    """Gates [T, H, 3] as means over heads, and the entropy of their shares of the three, in nats: float32 [T, 4]."""
    gates = gates.float()
    shares = gates / gates.sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    return torch.cat([gates, torch.special.entr(shares).sum(-1, keepdim=True)], -1).mean(1)


class NsaTurn(NamedTuple):
    """Rotary embeddings of each head by itself, in halves as Llama's: cosines and sines of rows and of blocks."""

    of_rows: tuple[Tensor, Tensor]
    of_blocks: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, config: NsaConfig, positions: Tensor, first_positions: Tensor | None, dtype: torch.dtype) -> NsaTurn:
        wide = torch.promote_types(dtype, torch.float32)
        half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=wide) / config.head_dim
        frequencies = config.rope_theta**-half

        def of(places: Tensor) -> tuple[Tensor, Tensor]:
            angles = places.to(wide)[:, None, None] * frequencies
            return angles.cos(), angles.sin()

        return cls(of(positions), None if first_positions is None else of(first_positions))

    def rows(self, heads: Tensor) -> Tensor:
        return _rotated(heads, *self.of_rows)

    def blocks(self, heads: Tensor) -> Tensor:
        assert self.of_blocks is not None
        return _rotated(heads, *self.of_blocks)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, H, d], turned by angles [T, 1, d / 2] in float32 at least."""
    a, b = heads.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(heads.dtype)


class NsaMLP(nn.Module):
    def __init__(self, config: NsaConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class NsaDecoderLayer(nn.Module):
    def __init__(self, config: NsaConfig) -> None:
        super().__init__()
        self.input_layernorm = NsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = NsaAttention(config)
        self.post_attention_layernorm = NsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = NsaMLP(config)

    def forward(self, hidden_states: Tensor, turn: NsaTurn, fork: Any, nsa: Any) -> Tensor:
        """Rows [1, T, D] -> [1, T, D], no view of another tensor: FSDP2 has a hook on it that a view may lose."""
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x)[0], turn, fork, nsa)[None]
        return x + self.mlp(self.post_attention_layernorm(x))


class NsaPreTrainedModel(PreTrainedModel):
    config: NsaConfig
    config_class = NsaConfig
    base_model_prefix = "model"
    _no_split_modules = ["NsaDecoderLayer"]  # noqa: RUF012
    supports_gradient_checkpointing = False

    def set_attn_implementation(self, *_: Any, **__: Any) -> None:
        """There is one: what the layers are handed."""

    def _init_weights(self, module: nn.Module) -> None:
        """Matrices are normal, gates begin at one half, learned positions at zero."""
        if isinstance(module, NsaGates):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, NsaCompression):
            for weight in (module.inner, module.outer):
                if weight is not None:
                    init.normal_(weight, mean=0.0, std=self.config.initializer_range)
            if module.positions is not None:
                init.zeros_(module.positions)
        else:
            super()._init_weights(module)


class NsaModel(NsaPreTrainedModel):
    def __init__(self, config: NsaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([NsaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = NsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        fork: Any = None,
        nsa: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """A batch [B, S] with a mask where it is padded; or one row of a pack, [1, T], with `fork` and `nsa`.

        Raises:
            ValueError: it is asked for what it has not.
        """
        for name in ("use_cache", "past_key_values", "cache", "output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise ValueError(f"{type(self).__name__} has no {name}: leave it out")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if fork is not None and position_ids is not None:
            return BaseModelOutput(last_hidden_state=self._run(hidden, position_ids[0], fork, nsa))
        there = _there(hidden, attention_mask)
        positions = (there.cumsum(1) - 1)[there]
        if position_ids is not None and not torch.equal(position_ids.expand(there.shape)[there], positions):
            raise ValueError("position_ids must count each sequence's tokens from 0: blocks lie by them")
        sequences = NsaSequences([n for n in there.sum(1).tolist() if n], self.config)
        rows = self._run(hidden[there][None], positions, sequences, sequences)
        return BaseModelOutput(last_hidden_state=torch.zeros_like(hidden).masked_scatter(there[..., None], rows))

    def _run(self, hidden: Tensor, positions: Tensor, fork: Any, nsa: Any) -> Tensor:
        """Rows [1, T, D], all sequences side by side."""
        config = self.config
        of_blocks = config.sparse and config.cmp_rope == "block_start"
        first = nsa.ops.first_positions.to(positions.device) if of_blocks else None
        turn = NsaTurn.of(config, positions, first, hidden.dtype)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, turn, fork, nsa.of_layer(number) if config.sparse else None)
        return self.norm(hidden)


def _there(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """bool [B, S], where a batch has tokens."""
    if mask is None:
        return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:2]:
        shape = tuple(hidden.shape[:2])
        raise ValueError(f"attention_mask must be {shape}, as the ids are, and is {tuple(mask.shape)}")
    return mask.bool()


class NsaForCausalLM(NsaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NsaConfig) -> None:
        super().__init__(config)
        self.model = NsaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits of a batch [B, S], and the mean loss of the labels' tokens where there are labels."""
        hidden = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)

    def generate(self, *args: Any, **more: Any) -> Any:
        """As every model of transformers generates, each token from the whole sequence: there is no cache."""
        return super().generate(*args, **{"use_cache": False, **more})
