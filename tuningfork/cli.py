"""The command line: tuningfork data | train | reference | eval | check-cluster, and launch for several processes."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tuningfork import __version__
from tuningfork.commands.launched import end_with_launcher
from tuningfork.errors import READING, SCORING, TRAINING, ConfigError, SaidElsewhere, TuningforkError, enough_memory
from tuningfork.library_words import show_library_words
from tuningfork.report.run.console import Console
from tuningfork.wording import visible

if TYPE_CHECKING:
    from tuningfork.recipe.run_config import RunConfig

_INTRODUCTION = """\
Train language models on preference pairs, answers to imitate, or documents.

A run is described by one recipe, a YAML file, and every key of it can be
overridden by a dotted flag. The shortest:

    model: {path: ./my-model}        a Hugging Face model folder
    data:  {train: pairs.jsonl}      rows of prompt, chosen, rejected
"""
_EXAMPLES = """\
examples:
  tuningfork data recipe.yaml                   what the data is, and costs
  tuningfork train recipe.yaml                  train; writes to output.dir
  tuningfork train recipe.yaml --train.seed 1   with one setting changed
  tuningfork train recipe.yaml --resume         go on after a kill or Ctrl-C
  tuningfork reference recipe.yaml              score the reference, no more
  tuningfork eval recipe.yaml                   the trained model on data.eval
  tuningfork eval recipe.yaml --policy ./model  another one, same reference
  tuningfork launch train recipe.yaml           on all GPUs of this machine
  tuningfork train --help                       every setting and its default
"""
# What a command takes beside a recipe and settings: option -> meaning.
_OWN: dict[str, dict[str, str]] = {
    "data": {
        "--strict": "exit with status 1 not only if training would refuse to start, but also if rows are dropped, "
        "repeat each other or contradict each other, if held-out rows have a prompt that is trained on, if words of a "
        "row spell control tokens, or if a sequence begins with BOS twice; not for rows that a mix or their own weight "
        "of 0 leaves out, nor for rows that are cut"
    },
    "train": {"--resume": "continue the run in output.dir, which must be there"},
    "reference": {},
    "eval": {
        "--policy": "the model folder to score; output.dir/model unless given. If neither a recipe nor "
        "model.path is, the recipe is the config.yaml of the run that exported that model, all but the folders to "
        "write to: output.dir, data.cache and reference.cache"
    },
    "check-cluster": {},
}
LAUNCH = "launch"
PATIENCE = 30.0  # seconds that one process of several waits for another to fail likewise
_LAUNCHABLE = ("train", "reference", "eval", "check-cluster")

# What a machine says no with, to any program.
_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EMFILE),
    *(errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns the exit status: 0 done, 1 `data` or `check-cluster` found something, 2 the user can mend it, 130 stopped
    by Ctrl-C or SIGTERM, 141 nobody reads on.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None or sys.stderr is None:  # closed, as `>&-` does
        return _unheard()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # of any encoding: what it has not is written as Python escapes it
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    try:
        try:
            if arguments[:1] == [LAUNCH]:
                return _launch(parser, arguments[1:])
            if not arguments or arguments[0] not in _OWN:
                if near := get_close_matches("".join(arguments[:1]), [*_OWN, LAUNCH], n=1):
                    raise ConfigError(f"{arguments[0]} is no command; did you mean tuningfork {near[0]}?")
                parser.parse_args(arguments or ["--help"])
            return _command(parser, arguments[0], arguments[1:])
        finally:
            sys.stdout.flush()  # now rather than at exit, where an error could not be caught
    except SaidElsewhere:
        return 2
    except TuningforkError as error:
        if not _left_to_first(wait=True):
            print(f"tuningfork: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:  # a command may say how to go on
        if not interrupt.args and _left_to_first():
            return 130
        print(visible("; ".join(["tuningfork: interrupted", *map(str, interrupt.args)])), file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        return 141
    except OSError as error:  # where nobody knew more of the file than its name
        if error.filename is None and _is_deaf(sys.stdout):
            print(f"tuningfork: the standard output cannot be written: {error.strerror}.", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 2
        if error.filename is None or error.errno not in _REFUSED:
            raise
        print(f"tuningfork: {visible(str(error.filename))} cannot be used: {error.strerror}.", file=sys.stderr)
        return 2


def _left_to_first(wait: bool = False) -> bool:
    """Whether what this process has to say is left to another: processes of one machine that have not met yet fail
    alike, and the first of them says why. With `wait`, this one lives on until the launcher ends it for that reason;
    where that does not happen, it speaks itself."""
    torch = sys.modules.get("torch.distributed")
    met = torch is not None and torch.is_available() and torch.is_initialized()
    if met or os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    try:
        time.sleep(PATIENCE if wait else 0)
    except KeyboardInterrupt:
        return True
    return not wait


def _unheard() -> int:
    """Say, where there is somebody to hear it, that a command needs both of its outputs; the exit status."""
    if sys.stderr is not None:
        print("tuningfork: the standard output is closed. Send it to a file, or to /dev/null.", file=sys.stderr)
    elif sys.stdout is not None:
        print("tuningfork: the standard error output is closed. Send it to a file, or to /dev/null.", flush=True)
    return 2


def _is_deaf(stream: TextIO) -> bool:
    """Whether a stream takes nothing more, as on a full disk."""
    try:
        print(file=stream, flush=True)
    except OSError:
        return True
    return False


class _Parser(argparse.ArgumentParser):
    """Shows what it complains of: a shell may have put a stranger's file name into the command."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
        "check-cluster": "what this machine, or several, can do before a run of this recipe begins on them: versions, "
        "clocks, folders, links and GPUs",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", nargs="?", type=Path)
        for option in _OWN[name]:
            how: dict[str, Any] = {"type": _named} if option == "--policy" else {"action": "store_true"}
            command.add_argument(option, **how)
    text = "run another command on several processes, one a GPU"
    command = commands.add_parser(LAUNCH, help=text, description=text)
    command.add_argument(
        "--processes", type=_whole, metavar="N", help="how many on this machine; one a GPU unless given"
    )
    command.add_argument(
        "--nodes", type=_whole, default=1, metavar="M", help="how many machines launch this (default 1)"
    )
    command.add_argument("--rendezvous", metavar="HOST:PORT", help="where they meet: a free port of one of them")
    command.add_argument(
        "--max-restarts",
        type=lambda text: _whole(text, least=0),
        default=0,
        metavar="R",
        help="how often all are started again after one has failed; a run that has begun then goes on (default 0)",
    )
    command.add_argument(
        "--grace",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long they may save and end after Ctrl-C or SIGTERM before they are killed (default 120)",
    )
    command.add_argument("what", choices=_LAUNCHABLE, help="the command")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="its recipe, options and settings")
    return parser


def _whole(text: str, least: int = 1) -> int:
    """A number of processes, or of times."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{visible(repr(text))} is no whole number from {least} on")
    return int(text)


def _named(text: str) -> str:
    """The path of a model folder. An empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a model folder, or leave it out")
    return text


def _read(
    parser: argparse.ArgumentParser, name: str, arguments: Sequence[str], aloud: bool = True
) -> tuple[argparse.Namespace, RunConfig, Path | None]:
    """What a command's own options are, its checked settings, and the recipe that was found where none was given, which
    is said `aloud`."""
    from tuningfork.recipe.check import REQUIRED, TO_EVALUATE, WRITTEN
    from tuningfork.recipe.load import load_run_config
    from tuningfork.recipe.parse import split_flags

    mine, flags = split_flags(arguments, _OWN[name])
    _expect_no_more([argument for argument in mine if argument.startswith("--resume=")], mine)
    own, others = parser.parse_known_args([name, *mine])
    _expect_no_more(others, mine)
    if own.recipe and (setting := _as_setting(str(own.recipe))):
        raise ConfigError(f"{own.recipe} is no recipe. Settings are given as {setting}")
    recipe, required = own.recipe and own.recipe.expanduser(), TO_EVALUATE if name == "eval" else REQUIRED
    of_its_run = _recipe_of_its_run(own.policy, flags) if name == "eval" and recipe is None else None
    if of_its_run and aloud:
        print(f"recipe: {visible(str(of_its_run))}, of the run that the model is from")
    config = load_run_config(
        recipe or of_its_run,
        flags,
        f"tuningfork {name}",
        options=_OWN[name],
        required=required,
        without=WRITTEN if of_its_run else (),  # whoever has made that model does not say where we write
    )
    return own, config, of_its_run


def _launch(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """`tuningfork launch`: another command on several processes, once its recipe is known to be one."""
    own = parser.parse_args([LAUNCH, *arguments])
    _, config, _ = _read(parser, own.what, own.arguments, aloud=False)
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Before torch is imported, which reads it then: whoever has lost another process would show stacks of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from tuningfork.commands.launch import launch

    same = ["-m", "tuningfork", own.what, *own.arguments]
    limits = (own.max_restarts, own.grace, own.nodes, own.rendezvous)
    return launch(same, own.processes, config.train.device, *limits, parallel=config.parallel)


def _command(parser: argparse.ArgumentParser, name: str, arguments: Sequence[str]) -> int:
    begun = time.monotonic()
    own, config, of_its_run = _read(parser, name, arguments)
    if of_its_run:
        read = [
            ("model.path", config.model.path),
            ("data.eval", config.data.eval),
            ("data.template", config.data.template),
        ]
        print("reads", visible(", ".join(f"{key} {value}" for key, value in read if value is not None)))
        print(visible(f"writes to output.dir {config.output.dir}, whatever that run wrote to"))

    with suppress(ValueError):  # not in the main thread: whoever embeds us handles signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends a command as Ctrl-C does
        end_with_launcher()
    # Threads that wait should sleep, not spin: beside any other busy program, spinning costs several times the run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Packs differ a little in size; with fixed blocks of memory each new size would leave holes behind.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Processes that are started would take a file of the current folder, such as signal.py, for Python's own.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Heavy imports only now: help and mistakes in a recipe answer at once, and a wait is explained before it begins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # private: torch.utils._pytree
    for library in ("torchao", "torch.utils._pytree"):  # of kernels for other cards, and of each other's future
        logging.getLogger(library).setLevel(logging.ERROR)
    show_library_words()
    console = Console(_stream())
    console.startup.add("imports", time.monotonic() - begun)
    with console.stage("imports", "loading PyTorch and transformers"):
        from tuningfork.commands.check_cluster import check_cluster
        from tuningfork.commands.data import data
        from tuningfork.commands.evaluate import evaluate
        from tuningfork.commands.reference import reference
        from tuningfork.commands.train import train

    ways_out = {"data": READING, "reference": SCORING, "eval": SCORING}.get(name, TRAINING)
    with enough_memory(name, ways_out):
        if name == "train":
            return train(config, own.resume, console)
        if name == "data":
            return data(config, own.strict, console)
        if name == "check-cluster":
            return check_cluster(config, console)
        if name == "reference":
            return reference(config, console)
        return evaluate(config, own.policy and os.path.expanduser(own.policy), console)


def _stream() -> TextIO | None:
    """Where this process prints what a run says: nowhere, if it is one of several and not the first; its errors are
    told all the same."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        return open(os.devnull, "w")
    return None


def _expect_no_more(arguments: Sequence[str], given: Sequence[str]) -> None:
    """Raises ConfigError where a command was given more than its recipe, its options and settings."""
    if not arguments:
        return
    found = arguments[0]
    if setting := _as_setting(found):
        raise ConfigError(f"{found} is not expected here. Settings are given as {setting}")
    before = given[given.index(found) - 1] if given.index(found) else ""
    if found.startswith("--resume=") or before == "--resume":
        folder = found.removeprefix("--resume=")
        raise ConfigError(
            f"--resume takes no value, and {folder} is one: the run that goes on is the one in output.dir. Give "
            f"--output.dir {folder} with the settings of that run, or its own recipe: tuningfork train "
            f"{Path(folder) / 'config.yaml'} --resume"
        )
    raise ConfigError(
        f"{found} is not expected here: a command takes one recipe. Settings are given as --train.learning_rate 1e-6."
    )


def _as_setting(argument: str) -> str:
    """How a setting is given that was written as key=value; empty where the argument is none."""
    from tuningfork.recipe.run_config import SETTINGS

    key, equals, value = argument.partition("=")
    return f"--{key} {value}" if equals and key in SETTINGS else ""


def _recipe_of_its_run(policy: str | None, flags: Sequence[str]) -> Path | None:
    """The settings of the run that a policy was exported by, which say all else where no starting model is named."""
    recipe = None if policy is None else Path(policy).parent / "config.yaml"
    if recipe is None or any(flag.startswith("--model.path") for flag in flags) or not recipe.is_file():
        return None
    return recipe


if __name__ == "__main__":
    sys.exit(main())
