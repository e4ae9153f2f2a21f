"""Tiny random models and examples that the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from tuningfork.data.packing.layout import build_pack
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import Kernels, plain
from tuningfork.models.ccgqa.modeling_ccgqa import CcgqaConfig
from tuningfork.models.head import Head
from tuningfork.models.hf import attention, layers
from tuningfork.models.nsa import NsaConfig
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.records import PackedBatch, Source, TokenAnswer, TokenExample

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows are shorter than most test sequences, so that they cut something off.
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_BASE),
    "qwen2": lambda: transformers.Qwen2Config(**_BASE),
    "qwen3": lambda: transformers.Qwen3Config(**_BASE, head_dim=16),
    "olmo2": lambda: transformers.Olmo2Config(**_BASE),
    "olmo3": lambda: transformers.Olmo3Config(**_BASE, sliding_window=5),
    "mistral": lambda: transformers.MistralConfig(**_BASE, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**_BASE, head_dim=16, sliding_window=5, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_BASE, head_dim=16, sliding_window=5),
    "granite": lambda: transformers.GraniteConfig(**_BASE, logits_scaling=2.0, tie_word_embeddings=True),
    "cohere": lambda: transformers.CohereConfig(**_BASE, logit_scale=0.5),
    "phi": lambda: transformers.PhiConfig(**_BASE, resid_pdrop=0.0),  # its head has a bias
}

_DELTA: dict[str, Any] = {
    **_BASE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Three layers of the gated delta rule, then one of attention.
HYBRIDS: dict[str, Any] = {
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**_DELTA, rope_parameters={"rope_theta": None}),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**_DELTA, head_dim=16, num_experts=0),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**_DELTA, head_dim=16),
}
_LFM2: dict[str, Any] = {**_BASE, "layer_types": ["conv", "conv", "full_attention", "conv"]}
SHORT_CONVS: dict[str, Any] = {
    "lfm2": lambda: transformers.Lfm2Config(**_LFM2),
    "lfm2_with_biases": lambda: transformers.Lfm2Config(**_LFM2, conv_bias=True, conv_L_cache=4),
}

# Blocks so short that rows choose among them in most test sequences.
_NSA: dict[str, Any] = {
    **_BASE, "num_hidden_layers": 2, "head_dim": 8, "value_head_dim": 12, "window": 9,
    "block_length": 8, "block_stride": 4, "select_length": 16, "select_count": 4,
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "nsa": lambda: NsaConfig(**_NSA, gate_hidden=8, pe_values=True, cmp_rope="none"),
    "nsa_mean": lambda: NsaConfig(**_NSA, phi="mean", cmp_rope="before"),
    "nsa_linear": lambda: NsaConfig(**_NSA, phi="linear", phi_shared=True, tie_word_embeddings=True),
}
_CCGQA: dict[str, Any] = {**_BASE, "head_dim": 8}
CCGQA: dict[str, Any] = {
    "ccgqa": lambda: CcgqaConfig(**_CCGQA, depthwise_kernel_size=3, rotary_fraction=0.5),
    "ccgqa_recursive": lambda: CcgqaConfig(
        **{**_CCGQA, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2},
        **{"grouped_kernel_size": 3, "conv_bias": False, "value_shift": "channels", "tie_word_embeddings": True},
        **{"recursions": 3, "residual_scale": 0.5, "embedding_scale": 2.0},
    ),
}


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model whose logits are spread enough that mistakes show."""
    torch.manual_seed(seed)
    config = {**FAMILIES, **HYBRIDS, **SHORT_CONVS, **CCGQA, **SPARSE}[family]()
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.2)
            elif name.endswith("A_log"):  # a state that lasts for many tokens, so that a leak shows
                weight.uniform_(-5, -1)
            else:  # norms: away from the value that hides a missing multiplication
                weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype).train()


def tiny_gpt_oss() -> PreTrainedModel:
    """A random model with experts and attention sinks, in float32."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{**_BASE, "intermediate_size": 32},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        initializer_range=0.2,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    )
    for block in model.model.layers:
        torch.nn.init.normal_(block.self_attn.sinks)
    return model.train()


def tiny_policy(
    family: str = "llama", dtype: torch.dtype = torch.float64, kernels: Kernels | None = None, seed: int = 0
) -> Policy:
    return Policy(tiny_model(family, dtype, seed), kernels or plain(), dtype)


def tiny_gpt2(dtype: torch.dtype = torch.float64) -> Policy:
    """The one family that stays in float64 throughout: the others compute norms and rotary embeddings in float32."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return Policy(model.to(dtype).train(), plain(), dtype)


def with_form(op: str, form: Any) -> Kernels:
    """The plain kernels, but for what runs one op."""
    return with_forms(**{op: form})


def with_forms(**forms: Any) -> Kernels:
    """The plain kernels, but for what runs some ops."""
    return replace(plain(), forms={**plain().forms, **forms})


def with_row_logps(**functions: Any) -> Kernels:
    """The plain kernels, but for some functions of the op row_logps."""
    return with_form("row_logps", SimpleNamespace(**{**vars(plain_rows), **functions}))


def random_examples(
    shapes: Sequence[tuple[int, Sequence[int]]], seed: int = 0, vocab: int = VOCAB, holes: bool = False
) -> list[TokenExample]:
    """Examples with (prompt length, answer lengths); `holes` drops tokens in the middle of answers from the mask."""
    rng = np.random.default_rng(seed)
    examples = []
    for row, (p, answers) in enumerate(shapes, start=1):
        token_answers = []
        for a in answers:
            mask = np.ones(a, dtype=bool)
            if holes and a > 3:
                mask[1 : a // 2] = False
            token_answers.append(TokenAnswer(rng.integers(3, vocab, a).astype(np.int32), mask))
        prompt = rng.integers(3, vocab, p).astype(np.int32)
        examples.append(TokenExample(Source("random", row), prompt, tuple(token_answers)))
    return examples


def random_pairs(n: int, seed: int = 0, longest: int = 20, vocab: int = VOCAB) -> list[TokenExample]:
    rng = np.random.default_rng(seed + 1000)
    shapes = [(int(rng.integers(1, longest)), tuple(map(int, rng.integers(1, longest, 2)))) for _ in range(n)]
    return random_examples(shapes, seed, vocab)


def one_pack(examples: Sequence[TokenExample], share: Share, tokens: int = 256) -> PackedBatch:
    return build_pack(examples, tokens, share)


def limits_of(tokens: int = 256, share: Share = "prompt") -> PackLimits:
    return PackLimits.plan(tokens, share, compiled=False)


def head_of(policy: Policy, chunk_rows: int = 8192) -> Head:
    return Head(policy.kernels, policy.transform, chunk_rows)


def scorer_of(policy: Policy, chunk_rows: int = 8192) -> Scorer:
    return Scorer.of(policy, chunk_rows)


def score_alone(model: PreTrainedModel, example: TokenExample, form: str | None = None) -> list[torch.Tensor]:
    """Each answer's summed log-prob from plain transformers, its sequence alone in a batch of one: the truth."""
    with layers.taken_out(model):
        return _score_alone(model, example, form)


def _score_alone(model: PreTrainedModel, example: TokenExample, form: str | None) -> list[torch.Tensor]:
    # The sdpa form keeps float64 throughout; the eager one, which soft-capping needs, rounds its softmax to float32.
    capped = getattr(model.config, "attn_logit_softcapping", None)
    model.set_attn_implementation(form or ("eager" if capped else "sdpa"))
    try:
        sums = []
        for answer in example.answers:
            ids = torch.from_numpy(np.concatenate([example.prompt_ids, answer.ids])).long()[None].to(model.device)
            logps = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            p = len(example.prompt_ids)
            counted = [j for j in range(len(answer.ids)) if answer.mask[j] and p + j > 0]
            rows = torch.tensor([p + j - 1 for j in counted], device=ids.device, dtype=torch.long)
            sums.append(logps[rows, ids[0, rows + 1]].sum())
        return sums
    finally:
        model.set_attn_implementation(attention.NAME)
