"""The demo: train a real small model on preference pairs, and show what changed. `make demo` runs this.

The answers before and after come from plain transformers, the latter from the exported folder: what is exported works
without tuningfork.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep: much faster beside other busy programs
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from model import prepare_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuningfork import commands
from tuningfork.config import check, load_run_config
from tuningfork.errors import TuningforkError
from tuningfork.report.console import side_by_side

DEMO = Path(__file__).parent
ASKED = 12  # held-out prompts answered before and after
SHOWN = 3
PLAIN_WORDS = 8  # an answer with no more words than this is a plain one


def main() -> int:
    os.chdir(DEMO.parent)
    print(f"preparing the model in {DEMO.name}/model (half a minute, once)")
    prepare_model()
    config = load_run_config(DEMO / "recipe.yaml", sys.argv[1:], "demo/run.py")
    config = replace(config, output=replace(config.output, dir=str(_unused(Path(config.output.dir)))))
    check(config)

    held_out = [json.loads(line)["prompt"] for line in (DEMO / "held_out.jsonl").read_text().splitlines()]
    prompts = held_out[:: len(held_out) // ASKED][:ASKED]
    before = answers(config.model.path, prompts)
    status = commands.train(config, resume=False)
    if status:
        return status
    after = answers(str(Path(config.output.dir) / "model"), prompts)

    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if plain(new) and not plain(old)]
    print(f"\nHeld-out prompts, answered by plain transformers before and after (greedy, {ASKED} asked):\n")
    for i in (changed or list(range(ASKED)))[:SHOWN]:
        print(side_by_side(prompts[i], before[i], after[i]) + "\n")
    print(
        f"Answers of at most {PLAIN_WORDS} words: {sum(map(plain, before))} of {ASKED} before, "
        f"{sum(map(plain, after))} of {ASKED} after. The style is learned; facts that the model lacks are not."
    )
    return 0


def plain(answer: str) -> bool:
    return 0 < len(answer.split()) <= PLAIN_WORDS


def answers(folder: str, prompts: list[str]) -> list[str]:
    """Greedy answers of the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    ).to(device)
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _unused(folder: Path) -> Path:
    """The folder, or its name with the first number that is free: a second demo overwrites nothing."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TuningforkError, RuntimeError) as error:
        sys.exit(f"demo: {error}")
