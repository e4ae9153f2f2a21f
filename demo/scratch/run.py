"""Models from nothing: twins of about a million parameters learn the standard library byte by byte, as many steps each.

One page compares them: bits a byte of held-out text before and after, beside `gzip -9` of the same text, and what
each model writes before and after, by plain transformers. It is printed, and lies in runs/scratch/page.md. All together
take about five minutes on two CPU cores that have nothing else to do. `make scratch-demo` runs it.

Flags are settings, for all of them: python demo/scratch/run.py --train.max_steps 1000
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from texts import gzip_bits_a_byte, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuningfork.commands.train import train
from tuningfork.errors import TuningforkError
from tuningfork.recipe.check import check_run_config
from tuningfork.recipe.load import load_run_config
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import table

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "scratch-tiny.yaml"
FOLDER = Path("runs/scratch")
PROMPT = "def "
SAMPLE = 160  # bytes
HELD_OUT = 4096  # characters of each file that is held out, from its beginning

TWINS: dict[str, Mapping[str, Any]] = {
    "dense": {},
    # Three keys and values a token for one, in half as many heads; an MLP of two matrices for three.
    "nsa": {
        "model_type": "tuningfork_nsa",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 448,
        "block_length": 8,
        "block_stride": 4,
        "select_length": 16,
        "select_count": 4,
        "window": 32,
        "phi": "mean",
    },
    # Half as wide inside, and an MLP so much wider that it has as many parameters.
    "ccgqa": {
        "model_type": "tuningfork_ccgqa",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 448,
    },
}
"""What is compared: name -> settings of model.init that differ from the recipe's, such as another model_type."""


@dataclass(frozen=True)
class Trained:
    """What a twin came to."""

    name: str
    parameters: int
    steps: int
    seconds: float  # start and end of a run among them
    tokens_per_s: float  # of its steps
    before: float  # held-out bits a byte
    after: float
    samples: tuple[str, str]  # before and after


def main() -> int:
    os.chdir(ROOT)
    held_out = write(FOLDER, HELD_OUT)[1]
    gzip = gzip_bits_a_byte(held_out)
    config = load_run_config(RECIPE, [*_settings(), *sys.argv[1:]], "demo/scratch/run.py")
    twins = [_twin(config, name, changes) for name, changes in TWINS.items()]
    with ProcessPoolExecutor(len(twins), multiprocessing.get_context("spawn")) as pool:
        try:
            found = [*pool.map(learn, TWINS, twins)]
        except KeyboardInterrupt:  # each twin has seen it, too, and stops
            return 130
    done = [twin for twin in found if twin is not None]
    if len(done) < len(twins):
        return 130
    text = page(done, gzip)
    (FOLDER / "page.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nThis page: {FOLDER / 'page.md'}. The models: {', '.join(str(_folder(twin)) for twin in TWINS)}")
    return 0


def learn(name: str, config: RunConfig) -> Trained | None:
    """Train a twin on one thread, each line that it says behind its name; None where the user stopped it."""
    torch.set_num_threads(1)
    folder, begun = Path(config.output.dir), time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    with redirect_stdout(_Named(name, sys.stdout)):
        if train(config, resume=False):
            return None
    seconds = time.perf_counter() - begun
    scores = json.loads((folder / "eval.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    before, after = (scores[when]["bits/byte"] for when in ("before", "after"))
    samples = sample(folder / "start"), sample(folder / "model")
    size, rate = parameters(folder / "model"), summary["tokens_per_s"]
    return Trained(name, size, summary["last_step"], seconds, rate, before, after, samples)


class _Named(io.TextIOBase):
    """A stream that writes each whole line behind a name."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream, self._begun = name, stream, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        self._stream.write("".join(f"{self._name:>7} | {line}\n" for line in lines))
        self._stream.flush()
        return len(text)


def parameters(folder: Path) -> int:
    """Numbers that a model has, tied ones once."""
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).parameters())


def sample(folder: Path) -> str:
    """What the model in a folder writes behind PROMPT, by plain transformers, always the same."""
    tokenizer, model = [
        kind.from_pretrained(folder, trust_remote_code=False) for kind in (AutoTokenizer, AutoModelForCausalLM)
    ]
    torch.manual_seed(0)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    how = {"do_sample": True, "temperature": 0.7, "max_new_tokens": SAMPLE, "use_cache": False}
    with torch.inference_mode():
        return str(tokenizer.decode(model.generate(**inputs, **how)[0], skip_special_tokens=True))


def page(done: list[Trained], gzip: float) -> str:
    """The comparison, as text that is Markdown, too."""
    rows = [("", "parameters", "steps", "seconds", "tokens/s", "bits/byte before", "after")]
    for one in done:
        numbers = (
            f"{one.parameters:,}",
            f"{one.steps:,}",
            f"{one.seconds:.0f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.before:.3f}",
            f"{one.after:.3f}",
        )
        rows.append((one.name, *numbers))
    rows.append(("gzip -9", "", "", "", "", "", f"{gzip:.3f}"))
    compared = table(f"The first {HELD_OUT:,} characters of every 20th file of the standard library, held out", rows)
    parts = [f"```\n{compared}\n```"]
    for one in done:
        for when, text in zip(("before", "after"), one.samples, strict=True):
            shown = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
            parts.append(f"{one.name}, {when}:\n\n```\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def _twin(config: RunConfig, name: str, changes: Mapping[str, Any]) -> RunConfig:
    """The recipe with a twin's model, in a folder of its own."""
    assert isinstance(config.model.init, dict)
    model = replace(config.model, init={**config.model.init, **changes})
    cache = config.data.cache and f"{config.data.cache}-{name}"  # twins write at the same time
    data = replace(config.data, cache=cache)
    twin = replace(config, model=model, data=data, output=replace(config.output, dir=str(_folder(name))))
    check_run_config(twin)
    return twin


def _folder(name: str) -> Path:
    return FOLDER / name


def _settings() -> list[str]:
    """What is the demo's own, beside what its recipe says."""
    return [f"--data.train={FOLDER / 'train.jsonl'}", f"--data.eval={FOLDER / 'held_out.jsonl'}"]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TuningforkError as error:
        sys.exit(f"scratch-demo: {error}")
