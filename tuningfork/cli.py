"""The command line: tuningfork train | reference | eval."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tuningfork import __version__
from tuningfork.errors import TuningforkError

_INTRODUCTION = """\
Train language models on preference pairs.

A run is described by one recipe, a YAML file; every key of it can be overridden by a dotted flag. The shortest:

    model: {path: ./my-model}        a Hugging Face model folder
    data:  {train: pairs.jsonl}      rows of prompt, chosen, rejected
"""
_EXAMPLES = """\
examples:
  tuningfork train recipe.yaml                                  train; results go to output.dir
  tuningfork train recipe.yaml --train.learning_rate 1e-6       with one setting changed
  tuningfork train recipe.yaml --resume                         go on after a kill or Ctrl-C
  tuningfork reference recipe.yaml                              only score the reference (train does it by itself)
  tuningfork eval recipe.yaml                                   the trained model on data.eval, against its reference
  tuningfork eval recipe.yaml --policy other/model              another model against the same reference
  tuningfork train --help                                       every setting, with its meaning and default
"""
_OWN = {"train": ("--resume",), "reference": (), "eval": ("--policy",)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 done, 2 the user can mend it, 130 stopped by Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments or arguments[0] not in _OWN:
        parser.parse_args(arguments or ["--help"])
    try:
        return _command(parser, arguments[0], arguments[1:])
    except TuningforkError as error:
        print(f"tuningfork: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tuningfork: interrupted", file=sys.stderr)
        return 130


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
        "train": "train a model, or go on with --resume",
        "reference": "score the starting model's log-probs into the reference cache",
        "eval": "score a model on data.eval against the reference",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", nargs="?", type=Path, help="the recipe, a YAML file")
        if name == "train":
            command.add_argument("--resume", action="store_true", help="continue the run in output.dir if there is one")
        if name == "eval":
            command.add_argument("--policy", help="the model folder to score; output.dir/model unless given")
    return parser


def _command(parser: argparse.ArgumentParser, name: str, arguments: Sequence[str]) -> int:
    from tuningfork.config import load_run_config
    from tuningfork.recipe import split_flags

    mine, flags = split_flags(arguments, _OWN[name])
    own = parser.parse_args([name, *mine])
    config = load_run_config(own.recipe, flags, f"tuningfork {name}", options=_OWN[name])

    # Threads that wait should sleep, not spin: beside any other busy program, spinning costs several times the run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Heavy imports only now: help and mistakes in a recipe answer at once.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from tuningfork import commands

    if name == "train":
        return commands.train(config, own.resume)
    if name == "reference":
        return commands.reference(config)
    return commands.evaluate(config, own.policy)


if __name__ == "__main__":
    sys.exit(main())
