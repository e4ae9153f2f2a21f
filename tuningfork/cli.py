"""The command line: tuningfork data | train | reference | eval."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tuningfork import __version__
from tuningfork.errors import TuningforkError, enough_memory
from tuningfork.report.words import visible

_INTRODUCTION = """\
Train language models on preference pairs.

A run is described by one recipe, a YAML file; every key of it can be overridden by a dotted flag. The shortest:

    model: {path: ./my-model}        a Hugging Face model folder
    data:  {train: pairs.jsonl}      rows of prompt, chosen, rejected
"""
_EXAMPLES = """\
examples:
  tuningfork data recipe.yaml                                   what is in the data and what a run on it costs; no GPU
  tuningfork train recipe.yaml                                  train; results go to output.dir
  tuningfork train recipe.yaml --train.learning_rate 1e-6       with one setting changed
  tuningfork train recipe.yaml --resume                         go on after a kill or Ctrl-C
  tuningfork reference recipe.yaml                              only score the reference (train does it by itself)
  tuningfork eval recipe.yaml                                   the trained model on data.eval, against its reference
  tuningfork eval recipe.yaml --policy other/model              another model against the same reference
  tuningfork train --help                                       every setting, with its meaning and default
"""
# What a command takes beside a recipe and settings: option -> meaning.
_OWN: dict[str, dict[str, str]] = {
    "data": {
        "--strict": "exit with status 1 if the objective refuses rows, if rows are dropped, repeat each other or "
        "contradict each other, if held-out rows have a prompt that is trained on, if words of a row spell control "
        "tokens, if a row is longer than the model's positions, or if a sequence begins with BOS twice; not for rows "
        "that a mix or their own weight of 0 leaves out, nor for rows that are cut"
    },
    "train": {"--resume": "continue the run in output.dir, which must be there"},
    "reference": {},
    "eval": {
        "--policy": "the model folder to score; output.dir/model unless given. If neither a recipe nor "
        "model.path is, the recipe is the config.yaml of the run that exported that model"
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns the exit status: 0 done, 1 `data --strict` found something, 2 the user can mend it, 130 stopped by Ctrl-C or
    SIGTERM, 141 nobody reads on.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    try:
        try:
            if not arguments or arguments[0] not in _OWN:
                parser.parse_args(arguments or ["--help"])
            return _command(parser, arguments[0], arguments[1:])
        finally:
            sys.stdout.flush()  # now rather than at exit, where an error could not be caught
    except TuningforkError as error:
        said = visible(str(error), newline="\n")  # it may quote what a file holds, which a terminal would obey
        print(f"tuningfork: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:  # a command may say how to go on
        print("; ".join(["tuningfork: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tuningfork",
        description=_INTRODUCTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tuningfork {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    texts = {
        "data": "report on the data of a recipe; needs the tokenizer and config.json of the model, no weights",
        "train": "train a model, or go on with --resume",
        "reference": "score the starting model's log-probs into the reference cache",
        "eval": "score a model on data.eval against the reference",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", nargs="?", type=Path)
        for option in _OWN[name]:
            command.add_argument(option, action="store" if option == "--policy" else "store_true")
    return parser


def _command(parser: argparse.ArgumentParser, name: str, arguments: Sequence[str]) -> int:
    begun = time.monotonic()
    from tuningfork.config import REQUIRED, TO_EVALUATE, load_run_config
    from tuningfork.recipe import split_flags

    mine, flags = split_flags(arguments, _OWN[name])
    own = parser.parse_args([name, *mine])
    recipe, required = own.recipe, REQUIRED
    if name == "eval":
        recipe, required = recipe or _recipe_of_its_run(own.policy, flags), TO_EVALUATE
    config = load_run_config(recipe, flags, f"tuningfork {name}", options=_OWN[name], required=required)

    with suppress(ValueError):  # not in the main thread: whoever embeds us handles signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends a command as Ctrl-C does
    # Threads that wait should sleep, not spin: beside any other busy program, spinning costs several times the run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Packs differ a little in size; with fixed blocks of memory each new size would leave holes behind.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Heavy imports only now: help and mistakes in a recipe answer at once.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for library in ("torchao", "torch.utils._pytree"):  # of kernels for other cards, and of each other's future
        logging.getLogger(library).setLevel(logging.ERROR)
    from tuningfork import commands

    with enough_memory(name):
        if name == "train":
            console = commands.Console()
            console.startup.add("imports", time.monotonic() - begun)
            return commands.train(config, own.resume, console)
        if name == "data":
            return commands.data(config, own.strict)
        if name == "reference":
            return commands.reference(config)
        return commands.evaluate(config, own.policy)


def _recipe_of_its_run(policy: str | None, flags: Sequence[str]) -> Path | None:
    """The settings of the run that a policy was exported by, which say all else where no starting model is named."""
    recipe = None if policy is None else Path(policy).parent / "config.yaml"
    if recipe is None or any(flag.startswith("--model.path") for flag in flags) or not recipe.is_file():
        return None
    print(f"recipe: {visible(str(recipe))}, of the run that the model is from")
    return recipe


if __name__ == "__main__":
    sys.exit(main())
