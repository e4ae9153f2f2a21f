"""Where the source uses what libraries keep to themselves: what it shows, and what its comments say of it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tuningfork

ROOT = Path(tuningfork.__file__).parent
PAGE = ROOT.parent / "docs" / "private_apis.md"

DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}  # of named tuples and of os
REPLACED = {"excepthook", "showwarning"}  # in sys and warnings, whose pages say that one may
PYTHONS = {"__doc__", "__main__", "__metadata__", "__name__"}  # names of Python itself, and of safetensors' format
SOURCES = {"currentframe", "findsource", "getsource", "getsourcefile", "getsourcelines"}  # of the module inspect


@cache
def sources() -> dict[str, str]:
    return {str(path.relative_to(ROOT.parent)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


@cache
def marks() -> dict[str, list[tuple[str, int]]]:
    """What the comments of the source name -> (file, line) of each."""
    found = defaultdict(list)
    for file, source in sources().items():
        for number, line in enumerate(source.splitlines(), start=1):
            if named := re.search(r"# private: (.+)$", line):
                for name in named[1].split(", "):
                    found[name].append((file, number))
    return dict(found)


@cache
def listed() -> dict[str, list[str]]:
    """What the page lists -> the tests that it names for it."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {row[0].removeprefix("| ").strip("`"): re.findall(r"`(test_\w+)`", row[-1]) for row in rows}


def private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private names that our own source gives to something."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "tuningfork":
                found |= {alias.name for alias in node.names}
    return {name for name in found if private(name)}


def uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, name) for every use of what a library keeps to itself, as far as the source shows it: a private name,
    in an import, as an attribute, a keyword or a text; source that is read; and what is set in a library."""
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        not in ("tuningfork", "__future__")
    }

    def root(node: ast.expr) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    def in_one(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import(names=names):
                yield from (part for alias in names for part in alias.name.split(".") if private(part))
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] != "tuningfork":
                parts = [*module.split("."), *(alias.name for alias in names)]
                yield from (part for part in parts if private(part))
            case ast.Attribute(value=value, attr=name, ctx=context):
                theirs = root(value) in foreign
                kept = private(name) and name not in DOCUMENTED and (theirs or name not in own)
                read = root(value) == "inspect" and name in SOURCES
                put = isinstance(context, ast.Store) and name not in REPLACED
                if kept or (theirs and (read or put)):
                    yield name
            case ast.keyword(arg=str(name)) if private(name) and name not in own:
                yield name
            case ast.Constant(value=str(text)) if text.isidentifier() and text.startswith("_") and text.strip("_"):
                if text not in own and text not in PYTHONS:
                    yield text

    # What is put together of pieces, or looked for at the end of a name, is no name.
    pieces = {
        id(piece)
        for node in ast.walk(tree)
        for piece in (
            *(node.values if isinstance(node, ast.JoinedStr) else ()),
            *((node.left, node.right) if isinstance(node, ast.BinOp) else ()),
            *(
                node.args
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".endswith", ".removesuffix"))
                else ()
            ),
        )
    }

    def within(statement: ast.stmt, node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
        if isinstance(node, ast.stmt):
            statement = node
        if id(node) not in pieces:
            yield from ((statement, name) for name in in_one(node))
        for child in ast.iter_child_nodes(node):
            yield from within(statement, child)

    for statement in tree.body:
        yield from within(statement, statement)


def unmarked(sources: dict[str, str]) -> list[str]:
    """Uses that no comment beside them names: in their statement, or in the line before it."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    own = own_names(list(trees.values()))
    found = []
    for file, tree in trees.items():
        lines = sources[file].splitlines()
        for statement, name in uses(tree, own):
            last = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno
            beside = "\n".join(lines[max(statement.lineno - 2, 0) : last])
            if not any(name in named for named in re.findall(r"# private: (.+)$", beside, re.MULTILINE)):
                found.append(f"{file}:{statement.lineno}: {name}")
    return found
