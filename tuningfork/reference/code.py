"""A digest of the code that decides a log-prob's bits: what was scored by other code is not this run's reference."""

from __future__ import annotations

import inspect
import io
import sys
import token
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import xxhash
from torch.distributed.fsdp import FSDPModule

import tuningfork

_ROOT = Path(tuningfork.__file__).parent

_FORMATTED = -1  # the kind of f-strings here, whose tokens depend on Python's version

SCORING = (
    "records.py",
    "data/packing/layout.py",
    "data/packing/pack.py",
    "data/packing/tree.py",
    "models/activations.py",
    "models/compiler.py",
    "models/embedding.py",  # its hook runs where tokens are looked up
    "models/even.py",
    "models/head.py",
    "models/ccgqa",
    "models/hf/attention.py",
    "models/hf/ccgqa.py",
    "models/hf/gated_delta.py",
    "models/hf/layers.py",
    "models/hf/load.py",
    "models/hf/nsa.py",
    "models/hf/short_conv.py",
    "models/hf/watch.py",  # finds the blocks that are compiled
    "models/mixers",
    "models/nsa",
    "models/offload.py",
    "models/policy.py",
    "models/scorer.py",
    "models/sink.py",
    "models/split_k.py",
    "distributed/sums.py",
    "distributed/tensor.py",
    "kernels",
)
"""Files and folders of the package that a log-prob goes through, from token ids and a model in memory to the sum.

How weights came into memory is no part of it: their digest is of what is there."""


def scoring_files() -> list[Path]:
    """Every source file of SCORING."""
    places = [_ROOT / name for name in SCORING]
    return [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


@cache
def scoring_digest() -> str:
    """A hash of our own code on the way of a log-prob: its statements, not its comments or docstrings."""
    return _digest((str(file.relative_to(_ROOT)), file.read_text(encoding="utf-8")) for file in scoring_files())


def model_code_digest(model: object) -> str:
    """A hash of the file that a model's class is written in: a library may be changed without a change of version.

    PyTorch makes a class of a model's own where its weights are spread over processes; it has no file."""
    kind = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    module = sys.modules[kind.__module__]
    return _digest([(module.__name__, inspect.getsource(module))])  # private: transformers by inspect.getsource


def _digest(sources: Iterable[tuple[str, str]]) -> str:
    digest = xxhash.xxh3_128()
    for name, source in sources:
        digest.update(f"{name}\n{statements(source)}\n".encode())
    return digest.hexdigest()


def statements(source: str) -> str:
    """Python source without comments, docstrings and layout, a line for each statement: the same in every Python.

    Tokens are put together as they are written. Syntax trees, and what the library prints of them, change from version
    to version, and so does what is one token of an f-string.
    """
    lines, depth = [], 0
    line: list[str] = []
    only_text = True
    for kind, text in _tokens(source):
        if kind in (token.INDENT, token.DEDENT):
            depth += 1 if kind == token.INDENT else -1
        elif kind != token.NEWLINE:
            line.append(text)
            only_text &= kind == token.STRING
        else:
            if not only_text:  # a docstring, or a text that stands for itself behind a constant, does nothing
                lines.append(" " * depth + " ".join(line))
            line, only_text = [], True
    return "\n".join(lines)


def _tokens(source: str) -> Iterator[tuple[int, str]]:
    """Kind and text of each token that says something. An f-string is one, as it is written."""
    rows = list(io.StringIO(source))
    begun: list[tuple[int, int]] = []  # where the f-strings begin that are open, the outermost first
    for found in tokenize.generate_tokens(io.StringIO(source).readline):
        name = token.tok_name[found.type]
        if name.endswith("STRING_START"):
            begun.append(found.start)
        elif name.endswith("STRING_END"):
            start = begun.pop()
            if not begun:
                yield _FORMATTED, _between(rows, start, found.end)
        elif begun or found.type in (token.COMMENT, token.NL, token.ENDMARKER):
            continue
        elif found.type == token.STRING and "f" in found.string[: found.string.index(found.string[-1])].lower():
            yield _FORMATTED, found.string  # Python 3.11 has them whole
        else:
            yield found.type, found.string


def _between(rows: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Source from one place to another, each a line from 1 and a column from 0."""
    (first, left), (last, right) = start, end
    if first == last:
        return rows[first - 1][left:right]
    return "".join([rows[first - 1][left:], *rows[first : last - 1], rows[last - 1][:right]])
