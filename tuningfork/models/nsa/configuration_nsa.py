"""The sizes of a model with native sparse attention, as a config of transformers. See modeling_nsa.py."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from transformers import PreTrainedConfig

PHI = ("mean", "linear", "mlp")
CMP_ROPE = ("block_start", "none", "before")
_ALSO = (  # that a config.json may say of any model, beside what the library's own config has
    *("model_type", "auto_map", "torch_dtype", "name_or_path", "attn_implementation", "experts_implementation"),
    *("quantization_config", "transformers_weights"),
)


class NsaConfig(PreTrainedConfig):
    """Sizes of a model. Letters are the paper's.

    Args:
        num_key_value_heads: G, groups of query heads that share keys, values and chosen blocks.
        head_dim, value_head_dim: d_k and d_v, of one head; d_v is d_k where it is not given.
        intermediate_size: of the two matrices with SiLU between them; 4 x hidden_size where it is not given.
        block_length, block_stride: l and d, of compressed blocks.
        select_length, select_count: l' and n, of blocks that are read whole; `select_initial` first ones and
            `select_local` last ones are always among the n.
        window: w, rows that the window has, a row itself included.
        phi: how a block becomes one key, and one value: the mean of its rows; a linear map of all of them side by
            side; or one with a hidden layer of `phi_hidden` (twice the head's width) and SiLU. Maps are a group's own,
            or with `phi_shared` those of all, and add a learned position to keys, with `pe_values` to values too.
        cmp_rope: what the compressed branch rotates: the pooled key at its block's first position; nothing; or keys
            before they are pooled.
        gate_hidden: units of the gates' hidden layer; 0 has none.
        sparse: False makes the dense twin: one branch, of full attention, without gates.

    Raises:
        ValueError: sizes that do not fit together, all of them by name, or a setting that is none.
    """

    model_type = "tuningfork_nsa"

    def __init__(
        self,
        vocab_size: int = 320,
        hidden_size: int = 768,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int = 2,
        head_dim: int = 64,
        value_head_dim: int | None = None,
        block_length: int = 32,
        block_stride: int = 16,
        select_length: int = 64,
        select_count: int = 16,
        select_initial: int = 1,
        select_local: int = 2,
        window: int = 512,
        phi: str = "mlp",
        phi_hidden: int | None = None,
        phi_shared: bool = False,
        pe_values: bool = False,
        cmp_rope: str = "block_start",
        gate_hidden: int = 0,
        sparse: bool = True,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 65536,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        use_cache: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        own = {name: value for name, value in locals().items() if name in _SETTINGS}
        _check_names(kwargs)
        _check_types(own)
        own["intermediate_size"] = intermediate_size or 4 * hidden_size
        own["value_head_dim"] = value_head_dim or head_dim
        _check_sizes(own)
        super().__init__(**kwargs)
        for name, value in own.items():
            setattr(self, name, value)


_COUNTS = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"}
    | {"num_key_value_heads", "value_head_dim", "block_length", "block_stride", "select_length", "window"}
)
_LEAST_ZERO = frozenset({"select_initial", "gate_hidden"})
_FOLLOW = frozenset({"intermediate_size", "value_head_dim", "phi_hidden"})  # others, where they are null
_SETTINGS = frozenset(inspect.signature(NsaConfig.__init__).parameters) - {"self", "kwargs"}


def _check_names(others: dict[str, Any]) -> None:
    """A name that nobody reads is a mistake, and the model another than was meant."""
    known = {*_SETTINGS, *_ALSO, *PreTrainedConfig().to_dict()}
    for name in others:
        if name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, sorted(_SETTINGS), n=1)
            hint = f"; did you mean {near[0]}?" if near else f". There are {', '.join(sorted(_SETTINGS))}"
            raise ValueError(f"{name} is no setting of a model of type {NsaConfig.model_type}{hint}")


def _check_types(own: dict[str, Any]) -> None:
    """Before sizes are compared. A truth value is no number."""
    whole, number = (int,), (int, float)
    kinds = {
        **dict.fromkeys(_COUNTS | _LEAST_ZERO | {"select_count", "select_local", "max_position_embeddings"}, whole),
        **dict.fromkeys(("rope_theta", "rms_norm_eps", "initializer_range"), number),
        **dict.fromkeys(("phi_shared", "pe_values", "sparse", "tie_word_embeddings"), (bool,)),
        "phi_hidden": whole,
    }
    said = {whole: "a whole number", number: "a number", (bool,): "true or false"}
    for name, kind in kinds.items():
        if type(own[name]) not in kind and not (own[name] is None and name in _FOLLOW):
            raise ValueError(f"{name} must be {said[kind]}, and {name} is {own[name]!r}")
    if own["use_cache"]:
        raise ValueError("use_cache is true: this model has no cache of keys and values")


def _check_sizes(own: dict[str, Any]) -> None:
    wrong = []

    def must(holds: bool, rule: str, *names: str) -> None:
        if not holds:
            wrong.append(f"{rule}, and {' and '.join(f'{name} is {own[name]}' for name in names)}")

    for name in sorted(_COUNTS):
        must(own[name] >= 1, f"{name} must be at least 1", name)
    must(own["phi"] in PHI, f"phi must be one of {', '.join(PHI)}", "phi")
    must(own["cmp_rope"] in CMP_ROPE, f"cmp_rope must be one of {', '.join(CMP_ROPE)}", "cmp_rope")
    must(own["head_dim"] % 2 == 0, "head_dim must be even, for it is rotated in halves", "head_dim")
    for name in sorted(_LEAST_ZERO):
        must(own[name] >= 0, f"{name} must be at least 0", name)
    must(own["select_local"] >= 1, "select_local must be at least 1, for a row reads its own block", "select_local")
    forced = ("select_count", "select_initial", "select_local")
    must(
        own["select_count"] >= own["select_initial"] + own["select_local"],
        "select_count must have room for select_initial and select_local",
        *forced,
    )
    if not wrong:
        heads = ("num_attention_heads", "num_key_value_heads")
        must(own[heads[0]] % own[heads[1]] == 0, "num_key_value_heads must divide num_attention_heads", *heads)
        for name in ("block_length", "select_length"):
            must(own[name] % own["block_stride"] == 0, f"block_stride must divide {name}", "block_stride", name)
        lengths = ("block_length", "select_length")
        must(own[lengths[0]] <= own[lengths[1]], "block_length must not be larger than select_length", *lengths)
    if wrong:
        raise ValueError("; ".join(wrong))
