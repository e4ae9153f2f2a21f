"""Nothing that a file or folder holds is ever run: what the source may call, so that no such call is added later."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Others' code, which loads nothing from a folder.
LETTER_BY_LETTER = {"bench/trl_bench.py", "bench/workload.py", "bench/workload_long.py"}

NEEDED = {  # the end of a call's name -> what it must be told
    "from_pretrained": {"trust_remote_code": "False"},
    "from_config": {"trust_remote_code": "False"},
    "torch.load": {"weights_only": "True"},
    "dcp.load": {"storage_reader": "PlainReader(path, most, stood.layout.size)", "planner": "PlainPlanner()"},
    "yaml.load": {"Loader": "_Loader"},  # a SafeLoader
}
PLAIN = {"GenerationConfig.from_pretrained"}  # numbers and names alone, and it knows no such setting
PICKLES = {  # who may unpickle, and what
    "tuningfork/train/checkpoint_reader.py",  # by names that it knows
    "tuningfork/data/tokens/workers.py",  # what the process wrote itself, in a folder that nobody else may enter
}
UNPICKLERS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler"}
RUN = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "jinja2.Template"}
RUN_BY_METHOD = ("from_string", "get_template")  # of a template, outside of the library's sandbox
IMPORTED = {"dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "imp", "subprocess", "importlib"}
ONLY_OURS = {"importlib.metadata", "importlib.resources"}
BY_NAME = {  # who may import by a name that is data
    "tuningfork/report/sinks/__init__.py",  # modules of its own folder, by the list of them
    "tuningfork/__init__.py",  # the modules of its public names, by the table of them
}
BENCHES = {"subprocess", "importlib"}  # benchmarks and the demo start themselves, and look for packages


@cache
def sources() -> dict[str, ast.Module]:
    found = [path for room in ("tuningfork", "demo", "bench") for path in sorted((ROOT / room).rglob("*.py"))]
    found.append(ROOT / "tests" / "real_tokenizers.py")  # which fetches packages
    names = {str(path.relative_to(ROOT)): path for path in found}
    return {name: ast.parse(path.read_text()) for name, path in names.items() if name not in LETTER_BY_LETTER}


def wrong(tree: ast.Module, name: str) -> list[str]:
    """What in a source may run something that was read: its line, and what it is."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names if _runs(alias.name, name)]
        elif isinstance(node, ast.ImportFrom):
            found += [(node, full) for alias in node.names if _runs(full := f"{node.module}.{alias.name}", name)]
        elif isinstance(node, ast.Call):
            found += [(node, why) for why in _in_call(node)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLERS and name not in PICKLES:
            found.append((node, ast.unparse(node)))
    return [f"{node.lineno}: {what}" for node, what in found]


def _runs(imported: str, name: str) -> bool:
    module = imported.split(".")[0]
    if ".".join(imported.split(".")[:2]) in ONLY_OURS or (module == "pickle" and imported != "pickle"):
        return module == "pickle"  # its functions are seen by their full names alone
    if imported == "importlib.import_module" and name in BY_NAME:
        return False
    return module in IMPORTED - (set() if name.startswith("tuningfork/") else BENCHES)


def _in_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    for end, needed in NEEDED.items():
        if f".{called}".endswith(f".{end}") and called not in PLAIN:
            yield from (
                f"{called} without {key}={value}" for key, value in needed.items() if settings.get(key) != value
            )
    if settings.get("allow_pickle", "False") != "False":
        yield f"{called} with pickles"
    if called in RUN or called.rpartition(".")[2] in RUN_BY_METHOD:
        yield called


def test_nothing_that_was_read_is_run():
    assert {name: found for name, tree in sources().items() if (found := wrong(tree, name))} == {}


def test_nobody_looks_for_settings_that_would_trust_code():
    """No setting turns it on, so no recipe that somebody else wrote does."""
    for name, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", f"{name}:{node.value.lineno}"


@pytest.mark.parametrize(
    "line",
    [
        "AutoConfig.from_pretrained(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=None)",
        "transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)",
        "AutoModelForCausalLM.from_config(config)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "dcp.load(state, checkpoint_id=path)",
        "np.load(path, allow_pickle=True)",
        "pickle.loads(content)",
        "pickle.Unpickler(file)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "eval(text)",
        "jinja2.Environment().from_string(text)",
        "import joblib",
        "from dill import loads",
        "import subprocess",
        "from importlib import import_module",
        "from pickle import loads",
    ],
)
def test_the_reader_of_calls_sees_them(line):
    """Guards the guard."""
    assert wrong(ast.parse(line), "tuningfork/x.py")


def test_the_reader_of_calls_sees_what_is_there():
    calls = [
        ast.unparse(node.func)
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("from_pretrained", "torch.load", "dcp.load"))
    ]
    assert len(calls) > 10 and {"torch.load", "dcp.load", "AutoTokenizer.from_pretrained"} <= {*calls}
