"""A digest of the code that decides a log-prob's bits: what was scored by other code is not this run's reference."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import xxhash

import tuningfork

_ROOT = Path(tuningfork.__file__).parent

SCORING = (
    "records.py",
    "data/layout.py",
    "data/pack.py",
    "models",
    "kernels",
    "objective/head.py",
    "train/score.py",
)
"""Files and folders of the package that a log-prob goes through, from token ids and stored weights to the sum."""


def scoring_files() -> list[Path]:
    """Every source file of SCORING."""
    places = [_ROOT / name for name in SCORING]
    return [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


@cache
def scoring_digest() -> str:
    """A hash of our own code on the way of a log-prob: its statements, not its comments or docstrings."""
    return _digest((str(file.relative_to(_ROOT)), file.read_text(encoding="utf-8")) for file in scoring_files())


def model_code_digest(model: object) -> str:
    """The same of the file that a model's class is written in: a library may be changed without a change of version."""
    module = sys.modules[type(model).__module__]
    return _digest([(module.__name__, inspect.getsource(module))])


def _digest(sources: Iterable[tuple[str, str]]) -> str:
    digest = xxhash.xxh3_128()
    for name, source in sources:
        digest.update(f"{name}\n{statements(source)}\n".encode())
    return digest.hexdigest()


def statements(source: str) -> str:
    """Python source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    """A docstring, or a text that stands for itself behind a constant: neither does anything."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
