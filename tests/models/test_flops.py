"""Model flops counted by hand on tiny models (open-instruct#1457, #1466, #1719)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sweep_models import small_config, small_model
from tests.tiny import HYBRIDS, SHORT_CONVS, VOCAB, one_pack, random_examples, tiny_policy
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import plain
from tuningfork.models.flops import FlopCounter, by_itself
from tuningfork.models.hf import attention
from tuningfork.models.mixers.attention import Attention, AttentionLayer
from tuningfork.models.policy import Policy

# hidden 32, 4 heads and 2 key heads of width 8: q 32x32, k and v 32x16 each, o 32x32; gate, up, down 3 x 32x64
LLAMA_BLOCK = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
PAIR = random_examples([(3, (2, 4))])[0]  # 9 unique tokens, 6 logit rows


def attention_of(*layers: tuple[int, int | None, int], **times: int) -> tuple[Attention]:
    """The mixers of a model with attention of these widths, windows and widths of heads."""
    return (Attention(tuple(AttentionLayer(*layer) for layer in layers) * times.get("layers", 1)),)


def test_a_pair_on_a_tiny_llama_by_hand():
    counter = tiny_policy("llama").flops()
    assert counter == FlopCounter(4 * LLAMA_BLOCK, VOCAB * 32, attention_of((32, None, 8), layers=4))
    # (query, key) pairs: the prompt 1+2+3; the answer of 2 sees 4+5, that of 4 sees 4+5+6+7.
    pairs = 6 + 9 + 22
    matmuls = 2 * (4 * LLAMA_BLOCK) * 9
    head = 2 * (97 * 32) * 6
    attended = 4 * (4 * 8) * pairs * 4  # 4 flops a pair and head element, 4 layers
    assert counter.forward(*by_itself(PAIR)) == matmuls + head + attended == 663_552 + 37_248 + 18_944


def test_windows_count_only_what_they_show():
    counter = tiny_policy("olmo3").flops()  # window 5 in three layers, none in the fourth
    assert [(layer.width, layer.window) for layer in counter.mixers[0].layers] == [(32, 5)] * 3 + [(32, None)]
    # within 5: the prompt 1+2+3; 4+5; 4+5+5+5
    windowed = 6 + 9 + 19
    assert counter.forward(*by_itself(PAIR)) == 2 * (4 * LLAMA_BLOCK) * 9 + 2 * (97 * 32) * 6 + 4 * 32 * (
        3 * windowed + 37
    )


def test_head_width_may_differ_from_the_hidden_size():
    counter = tiny_policy("qwen3").flops()  # 4 heads, 2 key heads of width 16
    block = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64
    assert counter == FlopCounter(4 * block, VOCAB * 32, attention_of((64, None, 16), layers=4))


def test_biases_norms_and_embeddings_are_no_products():
    assert tiny_policy("qwen2").flops() == tiny_policy("llama").flops()  # qwen2 adds biases
    assert tiny_policy("granite").flops() == tiny_policy("llama").flops()  # granite ties its embeddings


def test_gpt2_keeps_its_weights_transposed_and_is_counted_all_the_same():
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    counter = Policy(model, plain(), torch.float32).flops()
    block = 16 * 48 + 16 * 16 + 2 * 16 * 64
    assert counter == FlopCounter(2 * block, 50 * 16, attention_of((16, None, 8), layers=2))


def test_a_window_that_the_model_ignores_is_no_window():
    """Llama configs carry keys that Llama never reads."""
    policy = tiny_policy("llama")
    policy.config.sliding_window = 2
    assert [mixer.windows for mixer in policy.flops().mixers] == [[None] * 4]


def test_masked_tokens_cost_their_row_but_no_head():
    [example] = random_examples([(3, (8, 2))], holes=True)
    counter = FlopCounter(block_weights=10, head_weights=100)
    assert counter.forward(*by_itself(example)) == 2 * 10 * 13 + 2 * 100 * (8 - 3 + 2)


def test_documents_and_rankings():
    counter = FlopCounter(block_weights=1, head_weights=1, mixers=attention_of((1, 3, 1), (1, None, 1)))
    [document] = random_examples([(0, (5,))])
    assert counter.forward(*by_itself(document)) == 2 * 5 + 2 * 4 + 4 * (1 + 2 + 3 + 3 + 3) + 4 * 15
    [ranking] = random_examples([(2, (1, 1, 2))])
    assert counter.forward(*by_itself(ranking)) == 2 * 6 + 2 * 4 + 4 * (3 + 3 + 3 + 6) + 4 * (3 + 3 + 3 + 7)


def test_work_counts_the_prompt_as_often_as_it_is_laid():
    """One weight a block and a head, one head of width 1: 2 flops a row, 2 a logit row, 4 a visible pair."""
    counter = FlopCounter(block_weights=1, head_weights=1, mixers=attention_of((1, None, 1)))
    [pair] = random_examples([(3, (2, 1))])
    assert counter.forward(*by_itself(pair)) == 2 * 6 + 2 * 3 + 4 * (6 + 9 + 4)
    assert sum(counter.forward(*by_itself(one)) for one in pair.alone()) == 2 * 9 + 2 * 3 + 4 * (15 + 10)


def test_training_is_three_forwards_of_every_example():
    counter = tiny_policy("olmo3").flops()
    for example in random_examples([(3, (2, 4)), (0, (7,)), (12, (1, 9))]):
        assert counter.training(*by_itself(example)) == 3 * counter.forward(*by_itself(example))
    assert counter.training([], 0) == 0


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention_pairs_are_the_visible_entries_of_the_mask(window):
    """Against a mask drawn out; the prompt's rows once, each answer's rows after its own prompt."""
    for p, answers in ((5, (3, 8)), (0, (4,)), (0, (4, 6)), (9, (1, 1, 1)), (1, (7,))):
        [example] = random_examples([(p, answers)])
        visible = 0
        for i, a in enumerate(answers):
            n = p + a
            row, column = np.arange(n)[:, None], np.arange(n)[None, :]
            mask = (column <= row) & (window is None or column > row - (window or 0))
            visible += int(mask[0 if i == 0 else p :].sum())
        counter = FlopCounter(block_weights=0, head_weights=0, mixers=attention_of((8, window, 8)))
        assert counter.forward(*by_itself(example)) == 4 * 8 * visible


class Products(TorchDispatchMode):
    """Adds up the flops of all two-dimensional matrix products, which attention in plain PyTorch does not use."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "cohere", *HYBRIDS, *SHORT_CONVS])
def test_block_products_are_those_that_really_run(family):
    policy = tiny_policy(family, torch.float32)
    batch = one_pack([PAIR], "prompt", tokens=64)
    with torch.no_grad(), Products() as products:
        policy.hidden_rows(batch)
    assert products.flops == 2 * policy.flops().block_weights * 64  # padding runs, though it is not counted


@pytest.mark.parametrize("kind", ["hrm_text", "gemma3n_text", "gemma4_text"])
def test_products_are_counted_as_often_as_they_run_forward_and_backward(kind):
    """HRM runs its blocks in cycles and trains the last of them only; Gemma's layers are not alike."""
    policy = Policy.plain(small_model(small_config(kind)), torch.float32)
    batch = one_pack([PAIR], "prompt", tokens=64)
    with Products() as forward:
        hidden = policy.hidden_rows(batch)
    with Products() as backward:
        hidden.sum().backward()
    counter = policy.flops()
    assert forward.flops == 2 * counter.block_weights * 64
    assert backward.flops == 4 * (counter.block_weights - counter.forward_only_weights) * 64
    assert (counter.forward_only_weights > 0) == (kind == "hrm_text")


def test_a_pack_counts_each_row_that_is_laid_and_each_logit_row():
    """One weight a block and a head, one head of width 1: 2 flops a row, 2 a logit row, 4 a visible pair."""
    counter = FlopCounter(block_weights=1, head_weights=1, mixers=attention_of((1, None, 1)))
    forward, alone = counter.forward(*by_itself(PAIR)), [counter.forward(*by_itself(part)) for part in PAIR.alone()]
    for share, expected in (("prompt", forward), ("none", sum(alone))):
        pack = one_pack([PAIR], share)
        assert counter.forward(pack.spans, len(pack.logit_rows)) == expected
    # The same pair again is laid once, and its logit rows are one another's.
    twice = build_pack([PAIR, PAIR], 64, "tree")
    assert counter.training(twice.spans, len(twice.logit_rows)) == 3 * forward
    # Two examples of one prompt of 40 tokens, which is laid once.
    [longer] = random_examples([(40, (2, 4))], seed=5)
    other = replace(longer, answers=(random_examples([(0, (6,))], seed=6)[0].answers[0],))
    tree = build_pack([longer, other], 128, "tree")
    rows, pairs = 40 + 2 + 4 + 6, 40 * 41 // 2 + (41 + 42) + (41 + 42 + 43 + 44) + sum(range(41, 47))
    # The answers' first tokens have the prompt's last row for a predictor, each a logit row of its own.
    assert counter.forward(tree.spans, len(tree.logit_rows)) == 2 * rows + 2 * (2 + 4 + 6) + 4 * pairs


# --- hybrid models in the sizes in which they are published: per row, millions of flops or less -----------------------


def _mlp(hidden: int, inner: int) -> int:
    return 3 * 2 * hidden * inner


def _gated_delta(hidden: int, keys: int, key_width: int, values: int, value_width: int, taps: int = 4) -> float:
    """Projections to queries, keys, values, output gate and both gates, and back; convolution; scan in chunks of 64."""
    q_and_k, v = 2 * keys * key_width, values * value_width
    products = 2 * hidden * (q_and_k + 2 * v + 2 * values) + 2 * v * hidden
    chunk = 64 * (6 * key_width + 4 * value_width) + 2 / 3 * 64**2
    return products + 2 * taps * (q_and_k + v) + values * (6 * key_width * value_width + chunk)


def _attention(hidden: int, heads: int, key_heads: int, width: int, gated: bool = False) -> int:
    """Products of an attention layer with its weights; where it is gated, queries come with a gate as wide as they."""
    return 2 * hidden * width * (heads * (3 if gated else 2) + 2 * key_heads)


def _short_conv(hidden: int, taps: int) -> int:
    return 2 * hidden * 3 * hidden + 2 * taps * hidden + 2 * hidden * hidden


_OLMO = {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96}
PUBLISHED: dict[str, tuple[Any, float, int]] = {
    # What four layers cost a row, three of them with a state; attention's pairs cost 4 flops a head's number each.
    "olmo_hybrid": (
        transformers.OlmoHybridConfig(
            hidden_size=3840, intermediate_size=11008, num_hidden_layers=4, num_attention_heads=30,
            num_key_value_heads=30, vocab_size=512, pad_token_id=0, linear_value_head_dim=192, **_OLMO,
        ),
        3 * _gated_delta(3840, 30, 96, 30, 192) + _attention(3840, 30, 30, 128) + 4 * _mlp(3840, 11008),
        30 * 128,
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=2, head_dim=256, vocab_size=512, num_experts=0, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        ),
        3 * _gated_delta(2048, 16, 128, 32, 128) + _attention(2048, 16, 2, 256, gated=True) + 4 * _mlp(2048, 5632),
        16 * 256,
    ),
    "qwen3_5_text": (
        transformers.Qwen3_5TextConfig(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=4, head_dim=256, vocab_size=512, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        ),
        3 * _gated_delta(4096, 16, 128, 32, 128) + _attention(4096, 16, 4, 256, gated=True) + 4 * _mlp(4096, 12288),
        16 * 256,
    ),
    "lfm2": (
        transformers.Lfm2Config(
            hidden_size=2048, intermediate_size=8192, block_auto_adjust_ff_dim=False, num_hidden_layers=4,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=512, conv_L_cache=3,
            layer_types=["conv", "conv", "full_attention", "conv"],
        ),
        3 * _short_conv(2048, 3) + _attention(2048, 32, 8, 64) + 4 * _mlp(2048, 8192),
        32 * 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_hybrid_models_cost_what_their_formulas_say(family):
    config, row, attended = PUBLISHED[family]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    counter = Policy.plain(model, torch.float32).flops()
    forward = row * 9 + 2 * config.hidden_size * 512 * 6 + 4 * attended * 37
    assert counter.forward(*by_itself(PAIR)) == pytest.approx(forward, rel=1e-4)  # PAIR: 9 rows, 6 logit rows, 37 pairs
    assert counter.training(*by_itself(PAIR)) == pytest.approx(3 * forward, rel=1e-4)


def test_the_formula_has_the_numbers_of_olmo_hybrid_7b():
    assert _gated_delta(3840, 30, 96, 30, 192) == pytest.approx(177.4e6 + 0.09e6 + 5.98e6, rel=1e-3)
    assert _mlp(3840, 11008) == pytest.approx(253.6e6, rel=1e-3)
