"""Does sparse attention find what lies beyond its window, in documents longer than any that it was trained on?

    python -m bench.needle                                      # a CPU: trained at 128 tokens, asked at 1,024
    python -m bench.needle --train 1024 --tokens 32768          # a GPU: trained at 1,024, asked at 8,192
    python -m bench.needle --block 4 --stages 128x300 1024x30 --tokens 1024 4096 --learning_rate 3e-3 1e-3

A document has pairs of a key and its value, scattered over tokens that mean nothing, and ends with all of its keys in
another order, each with its value behind it (associative recall; Arora et al. 2023, arXiv:2312.04927). Only these
values are learnt, and asked for. No pair lies where two layers with windows alone could read it from the end, so a
model whose gates are fixed to the window (0, 0, 1) must guess one of the values. Blocks and windows follow one length,
l = --block: d = l / 2, l' = 2 l, w = 4 l; 8 blocks are chosen. Unless it is said, it follows the documents that are
trained on first, l = length / 32.

Stages, so many steps on documents of one length each, follow one another with the same weights, each with a new
optimizer and schedule: what is learnt on short documents, where choices are soon right, is used on longer ones.

One JSON line for each model and length asked: `recall` is the share of values that are the likeliest token, `loss` the
mean loss of the last tenth of the last stage's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Of a model: `block` tokens are compressed to one, and `width` numbers stand for a token."""

    block: int
    width: int

    @property
    def window(self) -> int:
        return 4 * self.block

    @property
    def out_of_reach(self) -> int:
        """Tokens before the first question that windows alone can read there, or carry there."""
        return LAYERS * self.window

    @property
    def shortest(self) -> int:
        """Tokens of a document that has room for its pairs out of reach."""
        return 4 * PAIRS + self.out_of_reach

    def config(self, longest: int) -> Any:
        return AutoConfig.for_model(
            "tuningfork_nsa",
            vocab_size=PAIRS + 2 * KINDS,
            hidden_size=self.width,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.width // 4,
            block_length=self.block,
            block_stride=self.block // 2,
            select_length=2 * self.block,
            select_count=8,
            window=self.window,
            cmp_rope="none",  # what a block holds does not depend on where it lies
            rope_theta=1e6,  # most of a head turns little over the longest distance
            initializer_range=self.width**-0.5,  # as large as for wide models: 0.02 is next to nothing here
            max_position_embeddings=longest,
        )


class Stage(NamedTuple):
    """So many `steps` of `tokens` tokens, in documents of `length`, at a learning rate of `rate`."""

    length: int
    steps: int
    tokens: int
    rate: float

    def __str__(self) -> str:
        return f"{self.length}x{self.steps}"


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


def trained(size: Size, longest: int, stages: Sequence[Stage], seed: int, windows: bool) -> tuple[Policy, float]:
    """A policy behind all stages; and the mean loss of the last tenth of the last one's steps."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(size.config(longest), trust_remote_code=False).to(device()).train()
    if windows:
        window_alone(model)
    for number, (length, steps, tokens, rate) in enumerate(stages, start=1):
        train = TrainConfig(
            learning_rate=rate, max_steps=steps, tokens_per_step=tokens, schedule="wsd", warmup_steps=steps // 20,
            adam_beta2=0.95, weight_decay=0.1, activation_memory="none",
        )  # fmt: skip
        limits = PackLimits.plan(tokens, "none", compiled=device().type == "cuda")
        session = ready(model, ObjectiveConfig(name="lm"), train, 8192, limits)
        examples = documents(steps * (tokens // length), length, size.out_of_reach, seed=seed + number)
        loader = PackLoader(examples, order_of(examples, train), limits, session.pin_memory)
        losses = [step.loss for step in training_steps(loader, session, build_optimizer(model, train), None, train, 0)]
    last = losses[-max(1, steps // 10) :]
    return session.policy, sum(last) / len(last)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--train", type=int, default=128, help="tokens of a document to train on, a multiple of 64")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--stages", nargs="+", metavar="LENGTHxSTEPS", help="in place of --train and --steps")
    options.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of a step: one number, or each stage's")
    options.add_argument("--learning_rate", type=float, nargs="+", default=[3e-3], help="one, or each stage's")
    options.add_argument("--block", type=int, help="tokens that are compressed to one, even; else a 32nd of a document")
    options.add_argument("--width", type=int, default=64, help="of the model")
    options.add_argument("--longer", type=int, default=8, help="times that the longer documents to ask of are as long")
    options.add_argument("--ask", type=int, nargs="+", metavar="LENGTH", help="in place of both lengths")
    options.add_argument("--asked", type=int, default=64, help="documents of each length")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args(argv)
    try:
        stages = _stages(asked.stages or [f"{asked.train}x{asked.steps}"], asked.tokens, asked.learning_rate)
        size = Size(stages[0].length // 32 if asked.block is None else asked.block, asked.width)
        lengths = asked.ask or [stages[-1].length, asked.longer * stages[-1].length]
        _refuse(size, stages, lengths)
    except ValueError as error:
        options.error(str(error))
    about = {
        "trained_at": stages[-1].length,
        "block": size.block,
        "stages": [str(stage) for stage in stages],
        "steps": sum(stage.steps for stage in stages),
    }
    for name in ("nsa", "window"):
        policy, loss = trained(size, max(lengths), stages, asked.seed, windows=name == "window")
        for length in lengths:
            held_out = documents(asked.asked, length, size.out_of_reach, seed=asked.seed + 1_000_003)
            share = recall(policy, held_out, max(stages[-1].tokens, *lengths))
            found = {"model": name, "asked_at": length, **about, "loss": loss, "recall": share, "chance": 1 / KINDS}
            emit({**found, **environment()}, asked.out)


def _stages(texts: list[str], tokens: list[int], rates: list[float]) -> list[Stage]:
    """Of `LENGTHxSTEPS` each; tokens and rates are one for all of them, or one for each."""
    for name, given in (("--tokens", tokens), ("--learning_rate", rates)):
        if len(given) not in (1, len(texts)):
            raise ValueError(f"{name}: {len(given)} of {len(texts)} stages; give one for all, or one for each")
    found = []
    for number, text in enumerate(texts):
        length, cross, steps = text.partition("x")
        if not (cross and length.isdecimal() and steps.isdecimal() and int(length) and int(steps)):
            raise ValueError(f"--stages: {text!r} is not LENGTHxSTEPS, as 128x300 is")
        stage = Stage(int(length), int(steps), tokens[number % len(tokens)], rates[number % len(rates)])
        if stage.tokens < stage.length:
            raise ValueError(f"--tokens: {stage.tokens} of a step hold no document of {stage.length}")
        found.append(stage)
    return found


def _refuse(size: Size, stages: list[Stage], lengths: list[int]) -> None:
    if size.block < 2 or size.block % 2:
        raise ValueError(f"--block: {size.block} is not an even number of tokens; --train is to be a multiple of 64")
    for length in (*(stage.length for stage in stages), *lengths):
        if length < size.shortest:
            raise ValueError(f"a document of {length} has no room out of two windows' reach; {size.shortest} has")


if __name__ == "__main__":
    main()
