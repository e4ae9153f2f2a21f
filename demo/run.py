"""The demo: train a real small model on preference pairs, and show what changed. `make demo` runs this.

The answers before and after come from plain transformers (ask.py), the latter from the exported folder: what is
exported works without tuningfork.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ask import answers  # sets the environment: first of all that bring torch
from judge import LONGEST, SHORTEST, faults
from model import prepare_model

from tuningfork.commands.train import train
from tuningfork.errors import TuningforkError
from tuningfork.recipe.check import check_run_config
from tuningfork.recipe.load import load_run_config
from tuningfork.report.run.console import Console, side_by_side

DEMO = Path(__file__).parent
SHOWN = 8  # of the held-out prompts, evenly spaced: none is picked for its answer


def main() -> int:
    os.chdir(DEMO.parent)
    print(f"preparing the model in {DEMO.name}/model (half a minute, once)")
    prepare_model()
    config = load_run_config(DEMO / "recipe.yaml", sys.argv[1:], "demo/run.py")
    config = replace(config, output=replace(config.output, dir=str(_unused(Path(config.output.dir)))))
    check_run_config(config)
    trained = Path(config.output.dir) / "model"

    prompts = [json.loads(line)["prompt"] for line in (DEMO / "held_out.jsonl").read_text("utf-8").splitlines()]
    print(f"asking the model {len(prompts)} held-out questions, before training")
    before = answers(Path(config.model.path), prompts)
    status = train(config, resume=False)
    if status:
        return status
    print(f"\nasking the trained model the same {len(prompts)} questions")
    after = answers(trained, prompts)

    print(
        f"\nHeld-out questions before and after (greedy; {SHOWN} of {len(prompts)}, evenly spaced, … where cut off):\n"
    )
    width = Console().width
    for i in range(0, len(prompts), len(prompts) // SHOWN):
        print(side_by_side(prompts[i], before[i], after[i], width) + "\n")
    print(
        f"One plain sentence of {SHORTEST} to {LONGEST} words that names its subject: {_good(prompts, before)} of "
        f"{len(prompts)} before, {_good(prompts, after)} of {len(prompts)} after (by rule: demo/judge.py).\n"
        "The form is learned; facts that so small a model lacks are not.\n\n"
        f'Ask it yourself:     {_program("python")} demo/ask.py {trained} "What does a clown do?"\n'
        f"Train on your pairs: {_program('tuningfork')} train demo/recipe.yaml --data.train mine.jsonl "
        "--data.eval null --output.dir runs/mine"
    )
    return 0


def _good(prompts: list[str], answered: list[str]) -> int:
    return sum(not faults(prompt, answer) for prompt, answer in zip(prompts, answered, strict=True))


def _program(name: str) -> Path:
    """A program of the running Python's environment, as one types it here."""
    program = Path(sys.executable).parent / name
    return program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program


def _unused(folder: Path) -> Path:
    """The folder, or its name with the first number that is free: a second demo overwrites nothing."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TuningforkError, RuntimeError) as error:
        sys.exit(f"demo: {error}")
