"""Does sparse attention find what lies beyond its window, in documents longer than any that it was trained on?

    python -m bench.needle                                      # a CPU: trained at 128 tokens, asked at 1,024
    python -m bench.needle --train 1024 --tokens 32768          # a GPU: trained at 1,024, asked at 8,192

A document has pairs of a key and its value, scattered over tokens that mean nothing, and ends with all of its keys in
another order, each with its value behind it (associative recall; Arora et al. 2023, arXiv:2312.04927). Only these
values are learnt, and asked for. No pair lies where two layers with windows alone could read it from the end, so a
model whose gates are fixed to the window (0, 0, 1) must guess one of the values. Blocks and windows follow the length
of the documents that are trained on: l = length / 32, d = l / 2, l' = 2 l, w = length / 8; 8 blocks are chosen.

One JSON line for each model and length asked: `recall` is the share of values that are the likeliest token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.output import device, emit, environment, parser
from bench.step import ready
from tuningfork.data.packing.layout import build_pack
from tuningfork.data.packing.loader import PackLoader
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models.hf import own  # noqa: F401  model types of our own have a name from here on
from tuningfork.models.nsa.modeling_nsa import NsaGates
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.order import order_of
from tuningfork.train.steps import training_steps

PAIRS, KINDS = 4, 32
"""Pairs of a document, of as many keys; and how many values, and how many tokens that mean nothing, there are. Ids of
keys come first, then those of values."""
LAYERS = 2


@dataclass(frozen=True)
class Size:
    """Of documents that are trained on, `train` tokens each, and of the model: `width` numbers a token."""

    train: int
    width: int

    @property
    def window(self) -> int:
        return self.train // 8

    @property
    def out_of_reach(self) -> int:
        """Tokens before the first question that windows alone can read there, or carry there."""
        return LAYERS * self.window

    def config(self, longest: int) -> Any:
        block = self.train // 32
        return AutoConfig.for_model(
            "tuningfork_nsa",
            vocab_size=PAIRS + 2 * KINDS,
            hidden_size=self.width,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.width // 4,
            block_length=block,
            block_stride=block // 2,
            select_length=2 * block,
            select_count=8,
            window=self.window,
            cmp_rope="none",  # what a block holds does not depend on where it lies
            rope_theta=1e6,  # most of a head turns little over the longest distance
            initializer_range=self.width**-0.5,  # as large as for wide models: 0.02 is next to nothing here
            max_position_embeddings=longest,
        )


def documents(count: int, length: int, out_of_reach: int, seed: int) -> list[TokenExample]:
    """Documents of `length` tokens, whose PAIRS lie before the last `out_of_reach` tokens in front of the questions."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(length - 1, bool)
    counts[-2 * PAIRS + 1 :: 2] = True  # a value stands behind its key
    room = (length - 2 * PAIRS - out_of_reach) // 2
    found = []
    for row in range(1, count + 1):
        ids = rng.integers(PAIRS + KINDS, PAIRS + 2 * KINDS, length, np.int32)
        keys = rng.permutation(PAIRS)
        values = rng.integers(PAIRS, PAIRS + KINDS, PAIRS)
        places = 2 * rng.choice(room, PAIRS, replace=False)
        ids[places], ids[places + 1] = keys, values
        asked = rng.permutation(PAIRS)
        ids[-2 * PAIRS :] = np.stack([keys[asked], values[asked]], 1).flatten()
        found.append(TokenExample(Source("needle", row), ids[:1], (TokenAnswer(ids[1:], counts),)))
    return found


def window_alone(model: torch.nn.Module) -> None:
    """Fix the gates of a model: nothing of its compressed and selected branches, all of its window."""
    for gate in (module for module in model.modules() if isinstance(module, NsaGates)):
        closed = torch.tensor([-1e4, -1e4, 1e4]).repeat(gate.out_features // 3)
        gate.load_state_dict({"weight": torch.zeros_like(gate.weight), "bias": closed})
        gate.requires_grad_(False)


def recall(policy: Policy, examples: list[TokenExample], tokens: int) -> float:
    """The share of counted tokens that the policy thinks likeliest, in packs of about `tokens`."""
    at_once, right, asked = max(1, tokens // examples[0].longest), 0, 0
    for first in range(0, len(examples), at_once):
        some = examples[first : first + at_once]
        batch = build_pack(some, sum(example.unique_tokens for example in some), "none").to(policy.device)
        with torch.no_grad():
            logits = policy.hidden_rows(batch) @ policy.head_weight.to(policy.dtype).t()
        hit = (logits.argmax(-1) == batch.targets)[batch.logit_row_of_counted]
        right, asked = right + int(hit.sum()), asked + len(hit)
    return right / asked


def trained(size: Size, longest: int, tokens: int, steps: int, rate: float, seed: int, windows: bool) -> Any:
    """A policy behind so many steps of `tokens` tokens; and the mean loss of the last tenth of them."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(size.config(longest), trust_remote_code=False).to(device()).train()
    if windows:
        window_alone(model)
    train = TrainConfig(
        learning_rate=rate, max_steps=steps, tokens_per_step=tokens, schedule="wsd", warmup_steps=steps // 20,
        adam_beta2=0.95, weight_decay=0.1, activation_memory="none",
    )  # fmt: skip
    limits = PackLimits.plan(tokens, "none", compiled=device().type == "cuda")
    session = ready(model, ObjectiveConfig(name="lm"), train, 8192, limits)
    examples = documents(steps * (tokens // size.train), size.train, size.out_of_reach, seed=seed + 1)
    loader = PackLoader(examples, order_of(examples, train), limits, session.pin_memory)
    losses = [step.loss for step in training_steps(loader, session, build_optimizer(model, train), None, train, 0)]
    last = losses[-max(1, steps // 10) :]
    return session.policy, sum(last) / len(last)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--train", type=int, default=128, help="tokens of a document to train on, a multiple of 64")
    options.add_argument("--longer", type=int, default=8, help="times that documents to ask of are as long")
    options.add_argument("--width", type=int, default=64, help="of the model")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--tokens", type=int, default=2048, help="of a step")
    options.add_argument("--learning_rate", type=float, default=3e-3)
    options.add_argument("--asked", type=int, default=64, help="documents of each length")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args(argv)
    size = Size(asked.train, asked.width)
    longest = asked.longer * asked.train
    for name in ("nsa", "window"):
        policy, loss = trained(
            size, longest, asked.tokens, asked.steps, asked.learning_rate, asked.seed, name == "window"
        )
        for length in (asked.train, longest):
            held_out = documents(asked.asked, length, size.out_of_reach, seed=asked.seed + 1_000_003)
            found = {"model": name, "trained_at": asked.train, "asked_at": length, "steps": asked.steps, "loss": loss}
            share = recall(policy, held_out, max(asked.tokens, longest))
            emit({**found, "recall": share, "chance": 1 / KINDS, **environment()}, asked.out)


if __name__ == "__main__":
    main()
