"""A small job to try the whole trainer on: model folder, preference file, recipe; and the command line on it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tests.distributed.worlds import environment, free_port
from tuningfork import cli
from tuningfork.report.run.writer import read_metrics

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
VOCAB = 300
POSITIONS = 256

_KIND = ("gladly", "of course", "here you are", "let me help", "certainly")
_CURT = ("no", "leave me", "go away", "not now", "find it yourself")
_WORDS = ("bread", "river", "lamp", "garden", "stone", "winter", "letter", "music", "paper", "window", "7", "42", "ä")


def make_pairs(count: int, seed: int = 0, longest: int = 8) -> list[dict[str, str]]:
    """Rows whose chosen answer is always kind and whose rejected one is always curt."""
    rng = np.random.default_rng(seed)

    def words(n: int) -> str:
        return " ".join(rng.choice(_WORDS, n))

    return [
        {
            "prompt": f"tell me about {words(int(rng.integers(1, longest)))}",
            "chosen": f"{rng.choice(_KIND)} {words(int(rng.integers(1, longest)))}",
            "rejected": f"{rng.choice(_CURT)} {words(int(rng.integers(1, longest)))}",
        }
        for _ in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make_tokenizer(chat_template: str | None = CHATML, vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """A byte-level BPE that has learnt a few merges from the words of the pairs."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [text for row in make_pairs(200, seed=9) for text in row.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(
    folder: Path,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    kind: type[PreTrainedConfig] = LlamaConfig,
    **config: Any,
) -> Path:
    """A random model of two layers, a Llama by default, saved with its tokenizer as a Hugging Face folder."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": torch.float32,
    }
    model = AutoModelForCausalLM.from_config(kind(**settings | config))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command ended with."""

    status: int
    out: str
    err: str


@dataclass
class Job:
    """One run's settings, dotted key -> value, and the folder that everything of it lies in."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return Path(self.settings["output.dir"])

    @property
    def cache(self) -> Path:
        return Path(self.settings["reference.cache"])

    @property
    def entry(self) -> Path:
        """The one entry of the reference cache."""
        [path] = self.cache.iterdir()
        return path

    def but(self, changes: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> Job:
        """The same job with other settings: but({"train.seed": 3}), or but(train={"seed": 3})."""
        flat = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
        return Job(self.folder, self.settings | dict(changes or {}) | flat)

    def elsewhere(self, name: str) -> Job:
        """The same job with a run folder of its own; the reference cache stays shared."""
        return self.but({"output.dir": str(self.folder / name)})

    def arguments(self, command: str, *options: str) -> list[str]:
        flags = []
        for key, value in self.settings.items():
            if value is not None:
                flags += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
        return [command, *flags, *options]

    def __call__(self, command: str = "train", *options: str) -> Outcome:
        """Run a command in this process."""
        return call(self.arguments(command, *options))

    def done(self, command: str = "train", *options: str) -> Outcome:
        """Run a command that must succeed."""
        outcome = self(command, *options)
        assert outcome.status == 0, outcome.err
        return outcome

    def refused(self, command: str = "train", *options: str) -> str:
        """Run a command that must refuse as a user's mistake; returns its message."""
        outcome = self(command, *options)
        assert outcome.status == 2, (outcome.status, outcome.err)
        assert outcome.err.startswith("tuningfork: ") and "Traceback" not in outcome.err, outcome.err
        return outcome.err

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of training steps."""
        return [line for line in self.lines() if "lr" in line]

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of held-out pairs, without the time that they took."""
        lines = [line for line in self.lines() if "lr" not in line]
        return [{key: value for key, value in line.items() if key != "eval/seconds"} for line in lines]

    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.run / "metrics.jsonl")

    def report(self, use: str = "train") -> dict[str, Any]:
        """What became of the rows to train on, or of those to evaluate on."""
        return json.loads((self.run / "data_rows.json").read_text())[use]

    def exported(self) -> dict[str, torch.Tensor]:
        return load_file(self.run / "model" / "model.safetensors")

    def checkpoints(self) -> list[str]:
        return sorted((path.name for path in (self.run / "checkpoints").iterdir()), key=lambda n: int(n.split("-")[1]))


def job_in(folder: Path, shelf: Path) -> Job:
    """Ten steps of four pairs of the shelf (see conftest.py), one epoch, everything of it in `folder`."""
    return Job(
        folder,
        {
            "model.path": shelf / "model",
            "data.train": shelf / "pairs.jsonl",
            "data.max_length": 128,
            "data.cache": folder / "tokens",
            "pack.tokens": 512,
            "reference.cache": folder / "cache",
            "train.examples_per_step": 4,
            "train.learning_rate": 1e-3,
            "train.device": "cpu",
            "output.dir": folder / "run",
        },
    )


def call(arguments: Sequence[str]) -> Outcome:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ):  # a command sets some variables
        status = cli.main(list(arguments))
    return Outcome(status, out.getvalue(), err.getvalue())


class Child:
    """The command line in a process of its own, which a test may kill.

    It is forked from a server that has imported everything already, so it is at work in milliseconds. Its output goes
    to files; `before` runs in it first, such as to patch something or to lower a limit.
    """

    _context = multiprocessing.get_context("forkserver")

    def __init__(self, arguments: Sequence[str], cwd: Path, before: Callable[[], None] | None = None) -> None:
        self.out, self.err = cwd / "child.out", cwd / "child.err"
        self.process = self._context.Process(target=_child, args=(list(arguments), self.out, self.err, before))
        self.process.start()

    def wait(self, seconds: float = 120.0) -> Outcome:
        """Its exit status as a shell gives it; minus the signal's number if one ended it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {seconds} s: {self.err.read_text()}")
        status = self.process.exitcode
        self.process.close()
        return Outcome(status, self.out.read_text(), self.err.read_text())

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill_when(self, ready: Callable[[], bool], seconds: float = 60.0) -> bool:
        """kill -9 as soon as `ready` says so. False if it ended before that."""
        until = time.monotonic() + seconds
        while self.process.is_alive():
            if ready():
                self.process.kill()
                return self.wait().status == -signal.SIGKILL
            assert time.monotonic() < until, "the moment never came"
            time.sleep(0.0005)
        self.wait()
        return False


def _child(arguments: list[str], out: Path, err: Path, before: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, number in ((out, 1), (err, 2)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if before is not None:
        before()
    try:
        status = cli.main(arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_two(job: Job) -> list[Outcome]:
    """Train as two processes that share out the weights, both of which must succeed."""
    port, children = free_port(), []
    for rank in range(2):
        folder = job.folder / f"rank-{rank}"
        folder.mkdir()
        be_rank = partial(_be, environment(rank, 2, port))
        children.append(Child(job.arguments("train"), folder, be_rank))
    outcomes = [child.wait() for child in children]
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    return outcomes


def _be(names: Mapping[str, str]) -> None:
    os.environ.update(names)


def start_server() -> None:
    """Import everything once, in the server that children are forked from."""
    os.environ["OMP_NUM_THREADS"] = "1"
    Child._context.set_forkserver_preload(["tests.end_to_end.warm"])


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Every entry of a checkpoint, flat: weights, optimizer moments and step counts, random generator."""
    keys: dict[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for key, entry in keys.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def assert_same_state(job: Job, other: Job, step: int) -> None:
    """Weights, optimizer, random generator after a step, and the exported models are equal to the bit."""
    last = f"checkpoints/step-{step}"
    assert unequal(state_of(job.run / last), state_of(other.run / last)) == []
    assert unequal(job.exported(), other.exported()) == []


def unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both to the bit."""

    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if torch.is_tensor(x) and torch.is_tensor(y) else x == y

    return [key for key in sorted({*a, *b}) if key not in a or key not in b or not same(a[key], b[key])]
