"""Make the demo's preference pairs: our plain sentences against the model's own answers.

    python demo/sample_rejected.py --force     # questions.jsonl -> pairs.jsonl and held_out.jsonl, a few CPU minutes

Every question of questions.jsonl has an answer that we wrote, the chosen one: a plain sentence that names the subject
and says of it what a small model may know. The rejected one is drawn here from the model itself. That matters: against
answers in a style that the model never uses, DPO has nothing to unlearn. The margin grows and the model goes on
answering as before.

The two files are part of the demo, since another machine or library version may draw other answers from the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep: much faster beside other busy programs

import torch
from model import DEFAULT_FOLDER, prepare_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
QUESTIONS, TRAIN, HELD_OUT = HERE / "questions.jsonl", HERE / "pairs.jsonl", HERE / "held_out.jsonl"
HELD_OUT_ROWS = 40
# Top-p leaves the least likely words out: without it, many answers of so small a model are about something else.
TEMPERATURE, TOP_P = 0.8, 0.9
MAX_NEW_TOKENS = 32
BATCH = 40
ROUNDS = 10  # each with a seed of its own; a question is asked again only if its answer is of no use

Row = dict[str, str]


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Train and held-out rows. The file is ordered by topic, so evenly spaced rows hold out some of every topic."""
    held = [i * HELD_OUT_ROWS % len(rows) < HELD_OUT_ROWS for i in range(len(rows))]
    return (
        [row for row, out in zip(rows, held, strict=True) if not out],
        [row for row, out in zip(rows, held, strict=True) if out],
    )


def sample_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """One sampled answer for each prompt. An answer longer than MAX_NEW_TOKENS is cut off where it stands."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    # Padded on the left, so that every answer starts right behind its prompt.
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(
        **inputs, do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0, max_new_tokens=MAX_NEW_TOKENS
    )
    answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.rstrip("\ufffd").strip() for answer in answers]  # a cut may leave half a character behind


def is_useful(rejected: str, chosen: str) -> bool:
    """Whether a pair says anything: an answer that is ours but for capitals and punctuation is not worse than ours."""

    def letters(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    return bool(rejected) and letters(rejected) != letters(chosen)


def add_rejected(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row], seed: int) -> None:
    """Give every row its `rejected` answer."""
    missing = rows
    for round_ in range(ROUNDS):
        torch.manual_seed(seed + round_)
        for start in range(0, len(missing), BATCH):
            batch = missing[start : start + BATCH]
            for row, answer in zip(batch, sample_answers(model, tokenizer, [r["prompt"] for r in batch]), strict=True):
                row["rejected"] = answer
            print(f"round {round_ + 1}: {start + len(batch)} of {len(missing)} answers", flush=True)
        missing = [row for row in missing if not is_useful(row["rejected"], row["chosen"])]
        if not missing:
            return
    sys.exit(f"After {ROUNDS} rounds the model still answers as we do: {[row['prompt'] for row in missing]}")


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample the rejected answers of the demo's preference pairs.")
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="model folder, made if it is not there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="overwrite pairs.jsonl and held_out.jsonl")
    args = parser.parse_args()
    for path in (TRAIN, HELD_OUT):
        if path.exists() and not args.force:
            sys.exit(f"{path} exists. Add --force to overwrite it.")
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    folder = prepare_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    add_rejected(model, tokenizer, rows, args.seed)
    train, held_out = split(rows)
    write(TRAIN, train)
    write(HELD_OUT, held_out)


if __name__ == "__main__":
    main()
