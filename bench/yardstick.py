"""tuningfork on the fixed workload (workload.py), one GPU: the counterpart of trl_bench.py, one JSON line.

Runs the trainer's own steps: packing, cached reference, step-0 check, AdamW with float32 weights. Pairs/s divide all
512 pairs of one epoch by the wall time of that epoch, after a first epoch that compiled everything.

    python bench/yardstick.py --examples_per_step 16
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from workload import pairs, stats

from tuningfork.data.loader import EpochOrder, PackLoader, build_packs
from tuningfork.data.pack import plan_limits
from tuningfork.models import attention
from tuningfork.models.load import Loaded
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.head import Head
from tuningfork.objective.objectives import PreferenceObjective
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.reference.build import fill
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.throughput import RunTotals, peak_flops
from tuningfork.train.config import TrainConfig
from tuningfork.train.evaluate import check_start
from tuningfork.train.loop import training_steps
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.setup import Start

SHAPES = {
    "olmo2_1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 100352,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 100352,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="olmo2_1b", choices=SHAPES)
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--pack_tokens", type=int, default=16384)
    parser.add_argument("--share_prompt", type=int, default=1)
    parser.add_argument("--examples_per_step", type=int, default=16)
    parser.add_argument("--head_chunk_rows", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=3, help="the first one warms up")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiled = device.type == "cuda"
    dtype = torch.bfloat16 if compiled else torch.float32
    workload = pairs(args.pairs)
    examples = [_example(row, pair) for row, pair in enumerate(workload, start=1)]

    config = transformers.Olmo2Config(
        **SHAPES[args.model],
        max_position_embeddings=4096,
        rope_theta=500000,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.NAME, dtype=torch.float32
        )
    policy = Policy.fast(model.train(), dtype)
    if compiled:
        policy.compile()
    head = Head(policy.kernels, policy.transform, args.head_chunk_rows)
    start = Start(policy, head, PreferenceObjective(ObjectiveConfig()), Loaded(model, torch.float32), compiled)

    train = TrainConfig(
        learning_rate=1e-6, examples_per_step=args.examples_per_step, epochs=args.epochs, schedule="constant"
    )
    limits = plan_limits(examples, args.pack_tokens, bool(args.share_prompt), compiled)
    order = EpochOrder.plan(len(examples), train.examples_per_step, train.seed, train.epochs, None)
    loader = PackLoader(examples, order, limits, pin_memory=compiled)

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        store = ReferenceStore(Path(cache), {"bench": "yardstick"})
        fill(store, examples, lambda some: build_packs(some, limits), start.score)
    reference_seconds = time.perf_counter() - begun
    checked = check_start(start, loader.step(0), store)

    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if compiled else None
    optimizer = build_optimizer(model, train)
    steps_an_epoch = args.pairs // train.examples_per_step
    totals, seconds, losses = RunTotals(peak), [], []
    for step in training_steps(loader, start, optimizer, store, train, 0):
        losses.append(step.loss_sum / step.examples)
        if step.step > steps_an_epoch:
            totals.add(step)
            seconds.append(step.seconds)
    rates = totals.summary()
    print(
        json.dumps(
            {
                "trainer": "tuningfork",
                "args": vars(args),
                "device": torch.cuda.get_device_name() if compiled else "cpu",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "parameters": sum(p.numel() for p in model.parameters()),
                "stats": stats(workload),
                "step0_pairs_exact": checked,
                "reference_s": round(reference_seconds, 1),
                "steps": totals.all.steps,
                "median_step_s": round(median(seconds), 4),
                "pairs_s": _rounded(rates["examples_per_s"]),
                "tokens_s": _rounded(rates["tokens_per_s"]),
                "unique_tokens_s": _rounded(rates["unique_tokens_per_s"]),
                "mfu": _rounded(rates["mfu"], 4),
                "pad_share": _rounded(rates["pad_share"], 4),
                "data_share": round(totals.all.data_seconds / totals.all.seconds, 4),
                "warmup_steps_left_out": rates["warmup_steps"],
                "peak_gib": _rounded(rates["peak_memory_gib"], 1),
                "first_loss": losses[0],
                "last_loss": losses[-1],
            }
        ),
        flush=True,
    )


def _example(row: int, pair: dict[str, list[int]]) -> TokenExample:
    ids = {name: np.array(values, dtype=np.int32) for name, values in pair.items() if name.endswith("_ids")}
    answers = (ids["chosen_ids"], ids["rejected_ids"])
    return TokenExample(
        Source("workload", row), ids["prompt_ids"], tuple(TokenAnswer(a, np.ones(len(a), dtype=bool)) for a in answers)
    )


def _rounded(value: float | int | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


if __name__ == "__main__":
    main()
