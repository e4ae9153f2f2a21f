"""TRL's SFTTrainer on the agent turns of tree_shapes.py, one GPU: examples a second, for each of some settings.

The model, data, order and steps are those of ``python -m bench.trees --shapes turns --orders grouped``. TRL computes
every example by itself, so no order of them saves it anything.

    python -m bench.trees_trl --settings "4 0" "8 1"          # examples a device, gradient checkpointing
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from bench import shapes, trl_steps
from bench.output import emit, environment, failure, parser, rounded, table
from bench.timing import free_memory
from bench.trees import groups_of, steps_of
from tuningfork.records import TokenExample

EXAMPLES_PER_STEP = 64


def rows_of(examples: list[TokenExample]) -> list[dict[str, list[int]]]:
    """Examples of one answer as TRL's collator takes them: labels of -100 do not count."""
    return [
        {
            "input_ids": [*example.prompt_ids.tolist(), *example.answers[0].ids.tolist()],
            "labels": [-100] * len(example.prompt_ids) + example.answers[0].ids.tolist(),
        }
        for example in examples
    ]


def measure(examples: list[TokenExample], model: str, at_once: int, checkpointing: bool) -> dict[str, Any]:
    """The line of one setting: the first step warms up."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    settings = shapes.config(model)
    settings.max_position_embeddings = 32768
    torch.manual_seed(0)
    with torch.device("cuda"):
        built = AutoModelForCausalLM.from_config(
            settings, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
        )
    times: list[float] = []

    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=EXAMPLES_PER_STEP // at_once,
        gradient_checkpointing=checkpointing,
        bf16=True,
        num_train_epochs=1,
        max_length=None,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        optim="adamw_torch_fused",
        learning_rate=1e-7,
        disable_tqdm=True,
    )
    torch.cuda.reset_peak_memory_stats()
    trainer = trl_steps.prepared(SFTTrainer)(
        model=built,
        args=config,
        train_dataset=Dataset.from_list(rows_of(examples)),
        processing_class=trl_steps.tokenizer(),
        callbacks=[trl_steps.clock(times)],
    )
    trainer.train()
    steady = times[1:]
    return {
        "examples_s": rounded(EXAMPLES_PER_STEP * len(steady) / sum(steady)),
        "step_s": rounded(sum(steady) / len(steady), 3),
        "peak_gib": rounded(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--settings", nargs="*", default=["4 0", "8 0", "8 1"])
    options.add_argument("--steps", type=int, default=2)
    args = options.parse_args(argv)
    groups = groups_of("turns", shapes.config(args.model).vocab_size, small=False)
    steps = steps_of(groups, "grouped", EXAMPLES_PER_STEP, args.steps)
    lines = []
    for setting in args.settings:
        at_once, checkpointing = setting.split()
        line: dict[str, Any] = {"bench": "trees_trl", "at_once": int(at_once), "checkpointing": checkpointing == "1"}
        try:
            line |= measure([e for step in steps for e in step], args.model, int(at_once), checkpointing == "1")
        except torch.OutOfMemoryError as error:
            line["error"] = failure(error)
        free_memory()
        lines.append(line | environment("trl", "accelerate"))
        emit(lines[-1], args.out)
    print(table(lines, {"at_once": "at once", "checkpointing": "checkpointing", "examples_s": "examples/s"}))


if __name__ == "__main__":
    main()
