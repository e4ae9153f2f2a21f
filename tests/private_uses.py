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
PYTHONS = {
    "__doc__",
    "__main__",
    "__metadata__",
    "__name__",
    "__version__",
}  # names of Python itself, and of safetensors' format
SOURCES = {"currentframe", "findsource", "getsource", "getsourcefile", "getsourcelines"}  # of the module inspect
SHOWING = (ast.Import, ast.ImportFrom, ast.Attribute, ast.keyword, ast.Constant)  # what can show a use


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


Nodes = list[tuple[ast.stmt, ast.AST]]
"""Every node of a module, with the innermost statement that it stands in."""


def nodes_of(source: str) -> Nodes:
    found: Nodes = []
    waiting: list[tuple[ast.stmt | None, ast.AST]] = [(None, ast.parse(source))]
    while waiting:
        statement, node = waiting.pop()
        statement = node if isinstance(node, ast.stmt) else statement
        if statement is not None:
            found.append((statement, node))
        waiting += [(statement, child) for child in ast.iter_child_nodes(node)]
    return found


def own_names(nodes: Nodes) -> set[str]:
    """Private names that a module of ours gives to something."""
    found = set()
    for _, node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "tuningfork":
                found |= {alias.name for alias in node.names}
    return {name for name in found if private(name)}


def uses(nodes: Nodes, own: set[str]) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, name) for every use of what a library keeps to itself, as far as the source shows it: a private name,
    in an import, as an attribute, a keyword or a text; source that is read; and what is set in a library."""
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for _, node in nodes
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

    def pieces(node: ast.AST) -> list[ast.expr]:
        """What is put together to a text, or looked for at the end of one, is no name."""
        match node:
            case ast.JoinedStr(values=values):
                return values
            case ast.BinOp(left=left, right=right):
                return [left, right]
            case ast.Call(func=ast.Attribute(attr="endswith" | "removesuffix"), args=args):
                return args
        return []

    no_names = {id(piece) for _, node in nodes for piece in pieces(node)}
    for statement, node in nodes:
        if isinstance(node, SHOWING) and id(node) not in no_names:
            yield from ((statement, name) for name in in_one(node))


def unmarked(sources: dict[str, str]) -> list[str]:
    """Uses that no comment beside them names: in their statement, or in the line before it."""
    nodes = {file: nodes_of(source) for file, source in sources.items()}
    own = set().union(*map(own_names, nodes.values()))
    found = []
    for file, of_file in nodes.items():
        lines = sources[file].splitlines()
        for statement, name in uses(of_file, own):
            last = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno
            beside = "\n".join(lines[max(statement.lineno - 2, 0) : last])
            if not any(name in named for named in re.findall(r"# private: (.+)$", beside, re.MULTILINE)):
                found.append(f"{file}:{statement.lineno}: {name}")
    return found
