"""The house rules, read off the source: who imports whom, how long a file may be, twins of kernels, knobs read."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

import tuningfork
from tests.conftest import LONGEST
from tuningfork.objective.kinds import OBJECTIVES
from tuningfork.recipe.run_config import RunConfig

ROOT = Path(tuningfork.__file__).parent
LINES = 400

EVERYONE = {
    "records",
    "accounts",
    "errors",
    "files",
    "json_files",
    "wording",
    "library_words",
    "ranges",
}  # may be imported by all, and import nothing of the house but each other
SETTINGS = {"recipe.run_config"}  # those of all rooms in one record, which any room may read
COMPOSERS = {"recipe", "cli", "commands", "api", "__main__"}  # may import all
ROOMS = {
    "data": set(),
    "kernels": set(),
    "report": set(),
    "models": {"kernels"},
    "objective": set(),
    "reference": set(),
    "distributed": {"data", "models"},
    "train": {"data", "distributed", "models", "objective", "reference", "report"},
    "lab": {"train", "data", "distributed", "kernels", "models", "objective", "reference", "report"},
}
SUB_ROOMS = {
    "data.token_table": set(),
    "data.packing": set(),
    "data.tables": set(),
    "data.sources": {"data.tables"},
    "data.examples": {"data.tables"},
    "data.config": {"data.examples", "data.packing"},
    "data.template_file": {"data.config"},
    "data.tokens": {"data.token_table", "data.tables", "data.examples", "data.config"},
    "data.token_cache": {"data.token_table", "data.tables", "data.examples", "data.config", "data.tokens"},
    "data.prepare": {
        "data.token_table",
        "data.sources",
        "data.examples",
        "data.config",
        "data.tokens",
        "data.token_cache",
    },
    "data.summary": {"data.packing", "data.examples", "data.config", "data.tokens", "data.prepare"},
    "models.mixers": set(),
    "models.nsa": set(),
    "models.ccgqa": set(),
    "models.hf": {"models.mixers", "models.ccgqa", "models.nsa"},
    "commands.resolve": set(),
    "commands.inputs": set(),
    "commands.summary": set(),
    "commands.launched": set(),
    "commands.launch": {"commands.launched"},
    "commands.check_cluster": {"commands.inputs"},
    "commands.data": {"commands.inputs", "commands.resolve"},
    "commands.reference": {"commands.inputs", "commands.resolve"},
    "commands.evaluate": {"commands.inputs", "commands.resolve", "commands.summary"},
    "commands.train": {"commands.inputs", "commands.resolve", "commands.summary"},
    "recipe.dialect": set(),
    "recipe.hints": set(),
    "recipe.run_config": {"recipe.dialect"},
    "recipe.validate": {"recipe.dialect", "recipe.hints"},
    "recipe.parse": {"recipe.dialect", "recipe.validate"},
    "recipe.check": {"recipe.run_config", "recipe.validate"},
    "recipe.help": {"recipe.run_config", "recipe.validate"},
    "recipe.load": {"recipe.run_config", "recipe.parse", "recipe.check", "recipe.help"},
    "report.files": set(),
    "report.sinks": set(),
    "report.run": {"report.files", "report.sinks"},
    "report.dataset": {"report.files"},
}
"""Rooms within a room -> their neighbours there from which they may import, all of which stand before them."""
OWN_FILES = {"models"}
"""Rooms that have files beside their folders. These may import from all of the folders, and no folder from them."""
RECORDS = {"report.dataset": {"data.summary.layouts", "data.summary.records"}}
"""Rooms within a room -> modules of other rooms that they may import, for these hold nothing but records."""


def name_of(path: Path) -> str:
    """``tuningfork/data/config.py`` -> ``data.config``; a package is its folder, the house itself the empty name."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(), str(path)) for path in sorted(ROOT.rglob("*.py"))}


def room(module: str) -> str:
    return module.partition(".")[0]


def sub_room(module: str) -> str:
    return ".".join(module.split(".")[:2])


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of the house that a module imports, anywhere in it, functions included."""
    found: set[str] = set()
    package = module if (ROOT / module.replace(".", "/") / "__init__.py").exists() else module.rpartition(".")[0]
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = [part for part in f"tuningfork.{package}".split(".") if part]
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            # `from a import b` means module a.b if there is one, else the name b in module a
            targets = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}".removeprefix("tuningfork.") in modules() else base
                for alias in node.names
            ]
        else:
            continue
        found |= {t.removeprefix("tuningfork").removeprefix(".") for t in targets if t.split(".")[0] == "tuningfork"}
    return frozenset(found - {""})


def test_the_reader_of_imports_sees_what_is_there():
    """Guards the guard: a few imports of each kind that are known to exist."""
    assert "data.packing.pack" in imports("data.packing.loader")
    assert "kernels.attention.fork" in imports("kernels.select")  # inside a function
    assert "models.hf.attention" in imports("models.hf.load")  # a module imported from its package
    assert {"recipe.load", "recipe.parse", "commands.train"} <= imports("cli")
    assert imports("records") == imports("wording") == frozenset()
    assert len(modules()) > 30


def test_every_module_lives_in_a_known_room():
    known = {*ROOMS, *EVERYONE, *COMPOSERS, ""}
    assert {room(module) for module in modules()} <= known


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_from_rooms_that_the_table_allows(name):
    allowed = ROOMS[name] | EVERYONE | {name}
    wrong = {
        f"{module} imports {other}"
        for module in modules()
        if room(module) == name
        for other in imports(module) - SETTINGS - RECORDS.get(sub_room(module), set())
        if room(other) not in allowed
    }
    assert not wrong


@pytest.mark.parametrize("name", sorted(set().union(*RECORDS.values())))
def test_records_for_other_rooms_are_dataclasses_that_need_nothing_else(name):
    """Whoever shows them imports no more of the room that makes them."""
    assert imports(name) - set().union(*RECORDS.values()) <= EVERYONE
    functions = [node.name for node in modules()[name].body if isinstance(node, ast.FunctionDef)]
    classes = [node for node in modules()[name].body if isinstance(node, ast.ClassDef)]
    assert not functions and classes
    assert all("dataclass(frozen=True" in ast.unparse(node.decorator_list[0]) for node in classes)


@pytest.mark.parametrize("name", SUB_ROOMS)
def test_a_room_within_a_room_imports_only_from_neighbours_that_the_table_allows(name):
    allowed = SUB_ROOMS[name] | {name}
    wrong = {
        f"{module} imports {other}"
        for module in modules()
        if sub_room(module) == name
        for other in imports(module)
        if room(other) == room(name) and sub_room(other) not in allowed
    }
    assert not wrong


@pytest.mark.parametrize("parent", sorted({room(name) for name in SUB_ROOMS}))
def test_every_module_of_a_parted_room_lives_in_a_known_part(parent):
    parts = [name for name in SUB_ROOMS if room(name) == parent]
    assert all(SUB_ROOMS[name] <= set(parts[:place]) for place, name in enumerate(parts))
    found = {sub_room(module) for module in modules() if room(module) == parent} - {parent}
    own = {name for name in found if parent in OWN_FILES and not (ROOT / name.replace(".", "/")).is_dir()}
    assert found - own <= set(SUB_ROOMS)


def test_what_everyone_imports_imports_nothing_else():
    for name in EVERYONE:
        assert imports(name) <= EVERYONE, name


def test_reading_a_recipe_needs_no_room():
    """What is not read of the settings themselves is known to `check`, `help` and `load` alone."""
    for name in ("dialect", "hints", "validate", "parse"):
        assert {room(module) for module in imports(f"recipe.{name}")} <= EVERYONE | {"recipe"}, name
    rooms = {module for module in imports("recipe.run_config") if not module.endswith(".config")}
    assert rooms == {"recipe.dialect"}, "the record of all settings knows the rooms' settings, and nothing of the rooms"


def test_nobody_imports_what_composes_everything():
    for module in modules():
        if room(module) not in COMPOSERS:
            assert not {room(other) for other in imports(module) - SETTINGS} & COMPOSERS, module


def test_no_module_imports_itself_in_a_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for other in sorted(imports(module)):
            visit(other, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_fast_kernels_are_chosen_in_one_place():
    for module in modules():
        fast = {
            other
            for other in imports(module)
            if other.startswith("kernels.")
            and other.count(".") == 2
            and not other.endswith(".plain")
            and "._" not in other
        }
        assert not fast or module == "kernels.select", f"{module} imports {sorted(fast)}"


def test_files_are_short_enough_to_read():
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > LINES} == {}


def test_every_module_says_what_it_is_for():
    silent = {name for name, tree in modules().items() if tree.body and ast.get_docstring(tree) is None}
    assert silent == set()


def public_signatures(module: str) -> dict[str, list[str]]:
    """Functions of a kernel module, or the public methods of its public class, with the names of their parameters.

    A class's methods go by their own names: PlainAttention.attend and ForkAttention.attend are one function.
    """
    found: dict[str, list[str]] = {}
    for node in modules()[module].body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("_"):
            continue
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in inner:
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                continue
            if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                continue
            args = function.args
            names = [a.arg for a in (*args.posonlyargs, *args.args)] + ["*"] + [a.arg for a in args.kwonlyargs]
            found[function.name] = [n for n in names if n not in ("self", "cls")]
    return found


OPS = sorted(path.name for path in (ROOT / "kernels").iterdir() if path.is_dir() and (path / "__init__.py").exists())


@pytest.mark.parametrize("op", OPS)
def test_every_fast_kernel_has_a_plain_twin_with_the_same_signature(op):
    plain = public_signatures(f"kernels.{op}.plain")
    assert plain
    fast = [m for m in modules() if m.startswith(f"kernels.{op}.") and not m.endswith(".plain") and "._" not in m]
    assert fast, "an op with one form only needs no folder"
    for module in fast:
        assert public_signatures(module) == plain, module


def test_no_plain_kernel_needs_a_gpu():
    for op in OPS:
        source = ast.unparse(modules()[f"kernels.{op}.plain"])
        assert "triton" not in source and "flex_attention" not in source and "cuda" not in source


# --- knobs -----------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, type] = {hint.__name__: hint for hint in get_type_hints(RunConfig).values()}


def config_reads(tree: ast.Module) -> set[tuple[str, str]]:
    """(config class, field) for every `x.field` in a module where x is known to be a config.

    Known are parameters and attributes annotated with a config class, a section of a RunConfig, and what is assigned
    from either: enough for code that passes configs around openly, and blind to `getattr` tricks on purpose.
    """
    reads: set[tuple[str, str]] = set()
    hints = {**{name: get_type_hints(cls) for name, cls in CONFIGS.items()}, "RunConfig": get_type_hints(RunConfig)}

    def kind_of(node: ast.expr | None, names: dict[str, str]) -> str | None:
        """The config class of an expression."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = kind_of(node.value, names)
            if owner is None and isinstance(node.value, ast.Name) and node.value.id == "self":
                return names.get(f"self.{node.attr}")
            hint = hints.get(owner or "", {}).get(node.attr)
            return hint.__name__ if isinstance(hint, type) and is_dataclass(hint) else None
        return None

    def annotated(annotation: ast.expr | None) -> str | None:
        name = ast.unparse(annotation).rpartition(".")[2] if annotation is not None else ""
        return name if name in hints else None

    def walk(node: ast.AST, names: dict[str, str]) -> None:
        if isinstance(node, ast.ClassDef):
            own = dict(names)
            for function in [n for n in node.body if isinstance(n, ast.FunctionDef)]:
                parameters = {a.arg: k for a in function.args.args if (k := annotated(a.annotation))}
                for assign in [n for n in ast.walk(function) if isinstance(n, ast.Assign)]:
                    for target in assign.targets:
                        if kind := kind_of(assign.value, parameters):
                            own[ast.unparse(target)] = kind
            names = own
        elif isinstance(node, ast.FunctionDef):
            args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            names = {**names, **{a.arg: k for a in args if (k := annotated(a.annotation))}}
        elif isinstance(node, ast.Assign):
            kind = kind_of(node.value, names)
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.pop(target.id, None)
                    if kind:
                        names[target.id] = kind
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (kind := kind_of(node.value, names))
        ):
            reads.add((kind, node.attr))
        for child in ast.iter_child_nodes(node):
            walk(child, names)

    walk(tree, {})
    return reads


@cache
def reads_outside_config() -> frozenset[tuple[str, str]]:
    """Reads by the code that acts on a knob; a room's config.py and the cross-room checks do not count."""
    return frozenset(
        read
        for name, tree in modules().items()
        if name.rpartition(".")[2] != "config" and room(name) != "recipe"
        for read in config_reads(tree)
    )


def test_the_reader_of_knobs_sees_a_knob_read_and_only_a_real_one():
    """Guards the guard: a field of some other object does not pass for a knob."""
    source = """
def read(config: TrainConfig, model: ModelConfig, run: RunConfig, other: Thing):
    alias = config
    return alias.seed, model.path, run.pack.tokens, other.epochs
class Holder:
    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
    def use(self):
        config = self.config
        return config.beta, self.config.gamma
"""
    assert config_reads(ast.parse(source)) == {
        ("TrainConfig", "seed"),
        ("ModelConfig", "path"),
        ("RunConfig", "pack"),
        ("PackConfig", "tokens"),
        ("ObjectiveConfig", "beta"),
        ("ObjectiveConfig", "gamma"),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_knob_is_read_by_something(name):
    """A documented knob that nothing reads does nothing; it dies, or it is read."""
    read = {field for kind, field in reads_outside_config() if kind == name}
    if name == "ObjectiveConfig":  # it builds the objective that it names, whose fields these settings are
        read |= {"name"} | set().union(*(kind.settings() for kind in OBJECTIVES.values()))
    assert not {f.name for f in fields(CONFIGS[name])} - read


def test_every_setting_of_an_objective_is_read_by_its_formula():
    """A field of a kind that its methods do not use would be a setting without effect."""
    for kind in OBJECTIVES.values():
        source = "".join(inspect.getsource(c) for c in kind.__mro__ if c.__module__.startswith("tuningfork"))
        for setting in kind.settings():
            assert f"self.{setting}" in source, (kind, setting)


def test_every_config_is_a_section_of_the_recipe():
    defined = {
        node.name
        for name, tree in modules().items()
        if name.rpartition(".")[2] == "config"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert defined == set(CONFIGS)


def test_a_process_that_makes_tokens_imports_no_more_than_it_needs() -> None:
    """Each would take seconds and hundreds of megabytes for it."""
    imported = "[name for name in ('torch', 'datasets', 'pandas', 'pyarrow') if name in sys.modules]"
    told = subprocess.run(
        [sys.executable, "-c", f"import sys, tuningfork.cli, tuningfork.data.tokens.workers; print({imported})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "[]\n"


def test_the_output_weight_is_read_in_one_place():
    """But by the checks of a start, which hold the head against other code. Who keeps it may then keep it in parts."""
    readers = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("head_weight", "head_bias")
    }
    checks = {"train.checks.head_check", "train.checks.self_check"}
    assert readers == {"models.policy", *checks}


def test_the_files_that_tests_begin_with_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT.parent / name).is_file()] == []
    assert len({*LONGEST}) == len(LONGEST)
