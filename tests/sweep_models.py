"""Every causal language model of transformers, made small and taken the way of a run: trained, or refused, and why.

    python -m tests.sweep_models --out docs/models.md      # about a minute on a CPU
    python -m tests.sweep_models --device cuda             # the same, and the GPU's kernels beside the plain ones

Each class gets its own default config with small sizes and random weights, and goes through the checks that a model
folder goes through, and those at the start of a run. What passes is compared with its own attention on sequences far
longer than its window: log-probs, and the gradient of every weight. Where they differ, or a class cannot be built, the
sweep stops with an error.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny import random_examples, score_alone, scorer_of
from tuningfork.data.packing.layout import build_pack
from tuningfork.errors import ModelError
from tuningfork.models.hf import attention
from tuningfork.models.hf.released import PARTS_OF_MORE
from tuningfork.models.hf.support import check_config, check_modules
from tuningfork.models.policy import Policy
from tuningfork.train.checks.kernel_check import KernelCheck
from tuningfork.train.checks.self_check import check_packed_equals_alone

WINDOW = 24
SHAPES = [(60, (70, 33)), (9, (140, 3)), (250, (40, 90))]
SECONDS = 60  # for each class
LOGPS_AGREE = 1e-4  # of the largest; float32 rounds to 1e-6, a mistake has its whole size
GRADIENTS_AGREE = 1e-2  # of a weight's norm; random weights this large spread rounding more than trained ones do
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "is_decoder": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# What a family needs besides, or otherwise, to be small.
OTHER: dict[str, dict[str, Any]] = {
    "blt": {f"{part}_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128,
                               "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
            for part in ("patcher", "encoder", "decoder", "global")} | {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                            for kind in ("sliding_attention", "full_attention")},
    },
    "dots1": {"n_routed_experts": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},  # as its checkpoints have
    "gptj": {"rotary_dim": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                     "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1,
                    "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16},
    "hrm_text": {"num_hidden_layers": 2},
    "minicpm3": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                 "num_key_value_heads": 4, "head_dim": None},
    "youtu": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
              "num_key_value_heads": 4, "head_dim": None},
    "opt": {"word_embed_proj_dim": 32},
}  # fmt: skip
# What a config cannot be made without.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of one class."""

    kind: str
    name: str  # of the class
    refused: str = ""  # the reason; trained where there is none


def default_config(kind: str) -> Any:
    """The config of a kind of model as its class has it, or of the language model that is taken of it."""
    config = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
    return config.get_text_config() if kind in PARTS_OF_MORE else config


def small_config(kind: str) -> Any:
    """The default config of a kind of model with small sizes, and with nothing left to chance."""
    default = default_config(kind)
    known = default.to_dict()
    values = {name: value for name, value in SMALL.items() if name in known or name in default.attribute_map}
    values |= {
        name: 0.0
        for name, value in known.items()
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0
    }
    kinds = list(dict.fromkeys(known.get("layer_types") or []))
    if kinds:
        values["layer_types"] = [kinds[i % len(kinds)] for i in range(SMALL["num_hidden_layers"])]
    values |= OTHER.get(kind, {})
    return type(default)(**{name: value for name, value in values.items() if value is not None})


def small_model(config: Any) -> Any:
    """A model whose attention and logits are spread enough that mistakes show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.25)
            else:  # away from the values that hide a missing sum or multiplication
                weight.add_(0.1 * torch.randn_like(weight))
    return model.train()


def judge(kind: str, device: str = "cpu") -> Verdict:
    """Build one kind of model and take it the way of a run.

    Raises:
        AssertionError: packed, it has other numbers than alone.
        TimeoutError: it takes too long.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    try:
        with _at_most(SECONDS):
            check_config(default_config(kind), kind)
            config = small_config(kind)
            check_config(config, kind)
            model = small_model(config).to(device)
            check_modules(model, kind)
            check_packed_equals_alone(model, kind)
            _check_kernels(model, kind)
            _compare(model)
    except ModelError as error:
        return Verdict(kind, name, _in_words(error, kind))
    return Verdict(kind, name)


def _check_kernels(model: Any, kind: str) -> None:
    """As training starts, in the dtype that it has on a GPU. On a CPU the kernels are the plain ones themselves."""
    policy = Policy.fast(model, torch.bfloat16)
    check = KernelCheck.begin(policy, kind, share="prompt", compiling=False)
    check.compare(policy)


def _compare(model: Any) -> None:
    """Log-probs and gradients of packed examples against plain transformers, in float32."""
    policy = Policy.plain(model, torch.float32)
    examples = random_examples(SHAPES, vocab=SMALL["vocab_size"])
    alone = torch.stack([logp for example in examples for logp in score_alone(model, example, "eager")])
    alone.sum().backward()
    truth = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    batch = build_pack(examples, sum(e.unique_tokens for e in examples), share="prompt").to(model.device)
    _, packed = scorer_of(policy).backward(batch, lambda a, b, logps: logps.sum())
    worst = float((packed - alone).detach().abs().max() / alone.detach().abs().max())
    assert worst < LOGPS_AGREE, f"log-probs differ by {worst:.1e}"
    largest = max(float(grad.norm()) for grad in truth.values() if grad is not None)
    for name, weight in model.named_parameters():
        assert (weight.grad is None) == (truth[name] is None), f"{name}: only one way has a gradient"
        if weight.grad is not None:
            error = float((weight.grad - truth[name]).norm() / (truth[name].norm() + 1e-3 * largest))
            assert error < GRADIENTS_AGREE, f"{name}: gradients differ by {error:.1e}"


def _in_words(error: ModelError, kind: str) -> str:
    """The message without the stand-in for a folder, which is the kind's name."""
    words = " ".join(str(error).split())
    for opening in (f"{kind}: ", f"{kind} ({kind}) ", f"{kind} "):
        words = words.removeprefix(opening)
    return words


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def page(verdicts: Iterable[Verdict]) -> str:
    """docs/models.md."""
    verdicts = sorted(verdicts, key=lambda verdict: verdict.kind)
    trained = [verdict for verdict in verdicts if not verdict.refused]
    refused = [verdict for verdict in verdicts if verdict.refused]
    lines = [
        "# Models",
        "",
        f"Every causal language model of transformers {transformers.__version__}, by the `model_type` of its "
        "config.json. Made by `python -m tests.sweep_models --out docs/models.md`, which builds each one small, with "
        "its default config and random weights, and takes it the way of a run.",
        "",
        f"## Trained ({len(trained)})",
        "",
        "A packed example has the log-probs and gradients that it has alone, also beyond the model's window. Rates of "
        "dropout and the like must be 0 in config.json. A checkpoint with settings other than the default ones, such "
        "as experts, may still be refused; the program says why.",
        "",
        "| model_type | class |",
        "| --- | --- |",
        *(f"| `{v.kind}` | {v.name} |" for v in trained),
        "",
        f"## Refused ({len(refused)})",
        "",
        "| model_type | class | reason |",
        "| --- | --- | --- |",
        *(row(verdict) for verdict in refused),
        "",
    ]
    return "\n".join(lines)


def row(verdict: Verdict) -> str:
    """A line of the table of what is refused."""
    reason = verdict.refused.replace("|", "\\|")
    return f"| `{verdict.kind}` | {verdict.name} | {reason[0].upper()}{reason[1:]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the page here; otherwise only say what is found")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the models run")
    parser.add_argument("kinds", nargs="*", help="model types to look at; all without any")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    verdicts, broken = [], []
    for kind in args.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            verdicts.append(judge(kind, args.device))
            print(f"{kind}: {verdicts[-1].refused or 'trained'}", flush=True)
        except Exception as error:  # all of them are named before the sweep fails
            broken.append(f"{kind}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            print(f"BROKEN {broken[-1]}", flush=True)
    if broken:
        sys.exit("\n".join(["No page is written:", *broken]))
    if args.out:
        args.out.write_text(page(verdicts))


if __name__ == "__main__":
    main()
