"""A hybrid model beside TRL's ways to lay pairs: the largest error of a log-prob against alone, and pairs a second.

Each way scores the same pairs under the same random weights, and trains on them by DPO with a cached reference:

- `padded`: a row of the batch for every answer behind its prompt, padded on the right, with a mask: what TRL's
  DPOTrainer does, under the model's own class in transformers.
- `position_ids`: these sequences side by side in one row, without padding, told apart by position ids alone: what
  collators without padding hand on, under the same class. Its attention sees the borders; its layers with a state do
  not.
- `TRL`: its DPOTrainer itself, padded, for pairs a second; only with `--trainer`, where trl, datasets and accelerate
  are installed, on a GPU.
- `tuningfork`: packs with every prompt laid once.

One line each:

    error           largest |summed log-prob of an answer - the same of its sequence alone|, nats, alone by the same
                    code; `error_token`: of a single token's
    equal           answers whose log-prob has the very bits that it has alone, of all
    to_class        tuningfork: largest |log-prob - that of the class, alone|, nats: rounding, not leaks
    pairs_s         pairs / seconds of training steps, after the first two
    state           where the class's scan is from: a package of kernels if one can be imported, else plain PyTorch

    python -m bench.hybrid_trl                                    # OLMo Hybrid, 1.5B, on a GPU; tiny on a CPU
    python -m bench.hybrid_trl --model olmo_hybrid_7b --layers 4 --trainer
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import shapes, trl_steps
from bench.output import device, emit, environment, failure, parser, rounded, table
from bench.step import start
from bench.timing import free_memory
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models.scorer import Scorer
from tuningfork.records import TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.session import Session
from tuningfork.train.step import train_step

WARM = 2  # steps that are not timed
BETA = 0.1
COLUMNS = {
    "way": "way",
    "error": "largest error, nats",
    "error_token": "of a token",
    "equal": "equal bits",
    "to_class": "to the class",
    "pairs_s": "pairs/s",
    "peak_gib": "peak GiB",
    "note": "note",
}

Logps = list[Tensor]
"""Of each sequence, the log-probs of its answer's tokens, float64 on the CPU if they are no part of a step."""


@dataclass(frozen=True)
class Laid:
    """A prompt and one answer."""

    ids: np.ndarray
    prompt: int

    @classmethod
    def of(cls, examples: Sequence[TokenExample]) -> list[Laid]:
        """Two for a pair: all chosen answers, then all rejected ones, as TRL has them."""
        return [
            cls(np.concatenate([example.prompt_ids, example.answers[place].ids]), len(example.prompt_ids))
            for place in range(2)
            for example in examples
        ]


def _answer_logps(logits: Tensor, ids: Tensor, prompt: int) -> Tensor:
    """Of the tokens behind the first `prompt`, from the logits [n, V] of a sequence of n ids; float32."""
    first = max(prompt, 1)
    return logits[first - 1 : len(ids) - 1].float().log_softmax(-1).gather(1, ids[first:, None])[:, 0]


def padded(model: nn.Module, sequences: Sequence[Laid]) -> Logps:
    """A row for each, padded on the right, with a mask."""
    where = next(model.parameters()).device
    rows = [torch.from_numpy(sequence.ids).long() for sequence in sequences]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(where)
    lengths = torch.tensor([len(row) for row in rows], device=where)
    mask = (torch.arange(ids.shape[1], device=where) < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [
        _answer_logps(logits[n, : len(row)], ids[n, : len(row)], sequence.prompt)
        for n, (row, sequence) in enumerate(zip(rows, sequences, strict=True))
    ]


def by_position_ids(model: nn.Module, sequences: Sequence[Laid]) -> Logps:
    """All in one row, side by side; positions begin at 0 in each."""
    where = next(model.parameters()).device
    rows = [torch.from_numpy(sequence.ids).long().to(where) for sequence in sequences]
    positions = torch.cat([torch.arange(len(row), device=where) for row in rows])
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False).logits[0]
    parts = logits.split([len(row) for row in rows])
    return [
        _answer_logps(part, row, sequence.prompt) for part, row, sequence in zip(parts, rows, sequences, strict=True)
    ]


def alone(model: nn.Module, sequences: Sequence[Laid]) -> Logps:
    """Each in a call of its own."""
    return [by_position_ids(model, [sequence])[0] for sequence in sequences]


Way = Callable[[nn.Module, Sequence[Laid]], Logps]
WAYS: dict[str, Way] = {"padded": padded, "position_ids": by_position_ids}


def _precision(where: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if where.type == "cuda" else nullcontext()


def of_all(way: Way, model: nn.Module, examples: Sequence[TokenExample], at_once: int) -> Logps:
    """What a way gives, so many pairs at once, float64 on the CPU: of each pair its chosen and its rejected answer."""
    found: Logps = []
    with torch.no_grad(), _precision(next(model.parameters()).device):
        for first in range(0, len(examples), at_once):
            some = examples[first : first + at_once]
            logps = [part.double().cpu() for part in way(model, Laid.of(some))]
            found += [part for pair in zip(logps[: len(some)], logps[len(some) :], strict=True) for part in pair]
    return found


def compared(found: Logps, truth: Logps) -> dict[str, Any]:
    """Errors of log-probs against those of the same sequences alone."""
    sums = [(abs(float(f.sum() - t.sum())), float((f - t).abs().max())) for f, t in zip(found, truth, strict=True)]
    return {
        "error": max(error for error, _ in sums),
        "error_token": max(error for _, error in sums),
        "equal": f"{sum(torch.equal(f, t) for f, t in zip(found, truth, strict=True))} of {len(found)}",
    }


def plain_speed(way: Way, model: nn.Module, steps: Sequence[Sequence[TokenExample]], at_once: int) -> dict[str, Any]:
    """Pairs a second of a plain training loop: gradients of so many pairs at once are added up, then AdamW moves."""
    where = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=where.type == "cuda")

    def step(examples: Sequence[TokenExample]) -> None:
        for first in range(0, len(examples), at_once):
            some = examples[first : first + at_once]
            with _precision(where):
                logps = torch.stack([part.sum() for part in way(model, Laid.of(some))])
            margins = BETA * (logps[: len(some)] - logps[len(some) :])  # a cached reference costs nothing more
            (-F.logsigmoid(margins).sum() / len(examples)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _speed([lambda examples=examples: step(examples) for examples in steps], len(steps[0]))  # type: ignore[misc]


def _speed(steps: Sequence[Callable[[], object]], pairs: int) -> dict[str, Any]:
    """Of training steps, the first of which warm up."""
    cuda, seconds = torch.cuda.is_available(), []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in steps:
        begun = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    timed = seconds[WARM:]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"pairs_s": rounded(pairs * len(timed) / sum(timed)), "peak_gib": rounded(peak, 1)}


def ours(scorer: Scorer, examples: Sequence[TokenExample], limits: PackLimits) -> list[Tensor]:
    """Summed log-probs of all answers in packs, float64 on the CPU: of each pair its chosen and its rejected one."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for pack in build_packs(examples, limits):
        logps = scorer.score(pack).cpu()
        counts = [len(example.answers) for example in pack.examples]
        found |= {example.id: part for example, part in zip(pack.examples, logps.split(counts), strict=True)}
    return [logp[None] for example in examples for logp in found[example.id]]


def ours_alone(scorer: Scorer, examples: Sequence[TokenExample], limits: PackLimits) -> list[Tensor]:
    """The same of each answer behind its own prompt, in a pack of its own."""
    parts = [[part] for example in examples for part in example.alone()]
    return [logp for part in parts for logp in ours(scorer, part, limits)]


def our_speed(
    session: Session, train: TrainConfig, steps: Sequence[Sequence[TokenExample]], limits: PackLimits
) -> dict[str, Any]:
    optimizer = build_optimizer(session.policy.model, train)
    batches = []
    for examples in steps:
        packs = build_packs(examples, limits)
        batches.append(StepBatch.of(packs, session.objective, np.zeros(sum(len(p.answer_lengths) for p in packs))))
    run = [
        lambda batch=batch: train_step(session.scorer, session.objective, optimizer, batch, 1.0) for batch in batches
    ]
    return _speed(run, len(steps[0]))  # type: ignore[arg-type]


def trainer_speed(model: nn.Module, steps: Sequence[Sequence[TokenExample]], at_once: int) -> dict[str, Any]:
    """TRL's DPOTrainer on these steps."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    times: list[float] = []
    rows = [
        {
            "prompt_ids": example.prompt_ids.tolist(),
            "chosen_ids": example.answers[0].ids.tolist(),
            "rejected_ids": example.answers[1].ids.tolist(),
        }
        for examples in steps
        for example in examples
    ]
    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=len(steps[0]) // at_once,
        gradient_checkpointing=False,
        max_length=None,
        bf16=True,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=at_once,
        optim="adamw_torch_fused",
        learning_rate=1e-7,
        disable_tqdm=True,
    )
    torch.cuda.reset_peak_memory_stats()
    trl_steps.prepared(DPOTrainer)(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=trl_steps.tokenizer(),
        callbacks=[trl_steps.clock(times)],
    ).train()
    timed = times[WARM:]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"pairs_s": rounded(len(steps[0]) * len(timed) / sum(timed)), "peak_gib": rounded(peak, 1)}


def measure(
    model: str,
    layers: int | None,
    scored: Sequence[TokenExample],
    steps: Sequence[Sequence[TokenExample]],
    at_once: int,
    pack_tokens: int,
    trainer: bool,
) -> Iterator[dict[str, Any]]:
    """A line for each way, as soon as it is known; what one cannot do is a result, too."""
    where = device()
    longest = max(example.longest for example in [*scored, *(example for step in steps for example in step)])
    state = next((name for name in ("fla", "kernels") if importlib.util.find_spec(name)), "plain PyTorch")

    def built() -> nn.Module:
        made = shapes.build(model, where, positions=longest, layers=layers)
        made.set_attn_implementation("sdpa")
        return made

    plain = built()
    truth = of_all(alone, plain, scored, 1)
    for name, way in WAYS.items():
        line: dict[str, Any] = {"way": name, "state": state}
        try:
            line |= compared(of_all(way, plain, scored, at_once), truth)
            line |= plain_speed(way, built(), steps, at_once)
        except Exception as error:
            line["note"] = failure(error)
        free_memory()
        yield line
    if trainer:
        line = {"way": "TRL", "state": state}
        try:
            line |= trainer_speed(built(), steps, at_once)
        except Exception as error:
            line["note"] = failure(error)
        yield line
    del plain
    free_memory()

    limits = PackLimits.plan(pack_tokens, "tree", compiled=where.type == "cuda")
    train = TrainConfig(learning_rate=1e-7, examples_per_step=len(steps[0]), schedule="constant")
    session = start(model, layers, longest, train, 8192, limits, torch.float32)
    found = ours(session.scorer, scored, limits)
    sums = [part.sum()[None] for part in truth]
    line = {"way": "tuningfork", **compared(found, ours_alone(session.scorer, scored, limits))}
    line["error_token"] = None  # it gives sums
    line["to_class"] = compared(found, sums)["error"]
    yield line | our_speed(session, train, steps, limits)


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny_hybrid" if small else "olmo_hybrid_1b", choices=shapes.SHAPES)
    options.add_argument("--layers", type=int, default=None, help="blocks of the shape; all where it is not given")
    options.add_argument("--scored", type=int, default=4 if small else 64, help="pairs whose log-probs are compared")
    options.add_argument("--steps", type=int, default=3 if small else 8)
    options.add_argument("--examples_per_step", type=int, default=2 if small else 16)
    options.add_argument("--at_once", type=int, default=2 if small else 4, help="pairs of a batch, but for ours")
    options.add_argument("--pack_tokens", type=int, default=512 if small else 16384, help="of ours")
    options.add_argument("--trainer", action="store_true", help="time TRL's DPOTrainer, too")
    args = options.parse_args(argv)
    vocabulary = shapes.config(args.model).vocab_size
    wanted = max(args.scored, args.steps * args.examples_per_step)
    if small:
        rng = np.random.default_rng(0)
        examples = shapes.random_pairs([tuple(map(int, rng.integers(1, 80, 3))) for _ in range(wanted)], vocabulary)  # type: ignore[misc]
    else:
        examples = shapes.yardstick(wanted, vocabulary)
    size = args.examples_per_step
    steps = [examples[first : first + size] for first in range(0, args.steps * size, size)]
    about = {"model": args.model, "layers": args.layers, **environment("trl", "fla-core", "accelerate")}
    lines = []
    for line in measure(
        args.model, args.layers, examples[: args.scored], steps, args.at_once, args.pack_tokens, args.trainer
    ):
        emit({"bench": "hybrid_trl", **line, **about}, args.out)
        lines.append(line)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
