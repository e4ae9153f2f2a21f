"""The front door: its names are frozen, cost nothing until they are used, and do what docs/api.md shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tuningfork
from tests.end_to_end.workbench import make_model, make_pairs, write_rows

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = dict(re.findall(r"^## (.*?)\n.*?^```python\n(.*?)^```", PAGE, re.M | re.S))

# A name that is gone breaks the programs of others: a new version says so in CHANGELOG.md, first under "Deprecated".
FROZEN = """
    ConfigError DPO DPONorm DataConfig DataError DataReport IPO IPOSum ModelError NonFiniteError OutOfMemory PackedBatch
    ReferenceMismatch ReferenceStore RunConfig RunFolderError SFT Scorer SimPO Source StepBatch TokenAnswer TokenExample
    TuningforkError __version__ build_scorer load_recipe load_tokenizer open_reference pack read_examples run_recipe
    train_step
"""


def test_the_public_names_are_these() -> None:
    assert tuningfork.__all__ == sorted(FROZEN.split())
    assert dir(tuningfork) == tuningfork.__all__
    for name in tuningfork.__all__:
        found = getattr(tuningfork, name)
        assert name == "__version__" or found.__doc__, f"{name} says nothing of itself"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tuningfork.nothing  # noqa: B018


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the place of the name."""
    names = {path.stem for path in (ROOT / "tuningfork").iterdir()}
    assert not names & set(tuningfork.__all__)


def test_a_name_costs_nothing_until_it_is_used() -> None:
    program = "import sys, tuningfork; tuningfork.DataError; tuningfork.DPO(); print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout == "False\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder and a file of pairs."""
    path = tmp_path_factory.mktemp("api")
    make_model(path / "model")
    write_rows(path / "pairs.jsonl", make_pairs(12))
    return path


def test_the_page_has_an_example_of_every_use() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == 5
    used = {name for name in tuningfork.__all__ if re.search(rf"\btf\.{name}\b", "".join(EXAMPLES.values()))}
    assert {"read_examples", "pack", "build_scorer", "open_reference", "train_step", "run_recipe"} < used


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_of_the_page_runs(
    title: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(compile(EXAMPLES[title], title, "exec"), {"__name__": "example"})  # as a reader would paste it
    out = capsys.readouterr().out
    expected: dict[str, Callable[[str], bool]] = {
        "Read and tokenize preference files": lambda out: "12 examples; 12 rows read; dropped: {}" in out,
        "Pack a list of your own": lambda out: "[3, 4, 9, 5, 6, 7] the prompt once; [0, 1, 2, 3, 4, 3]" in out,
        "Score with a model": lambda out: "of the chosen answers are the likelier ones" in out,
        "One training step": lambda out: out.startswith("0.693147"),
        "Run a recipe": lambda out: "'model.safetensors'" in out.splitlines()[-1],
    }
    assert expected[title](out), out
