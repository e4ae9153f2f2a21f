"""The digest of the code that scores: every module on a log-prob's way is in it, and only what is done counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, imports, name_of
from tests.tiny import tiny_model
from tuningfork.reference import code
from tuningfork.reference.code import model_code_digest, scoring_digest, scoring_files, statements

# From token ids and a model folder to a log-prob.
STEPS = ("data.pack", "data.layout", "models.load", "models.policy", "kernels.select", "objective.head", "train.score")
DECIDE_NO_BIT = {
    "errors": "words",
    "data.store": "where examples lie; their content is the key of what is scored",
    "data.bins": "which pack an example lies in; its log-prob is the same in any, which every start checks",
}


def on_the_way() -> set[str]:
    """Modules that scoring imports, directly or not."""
    found, new = set[str](), set(STEPS)
    while new:
        found |= new
        new = {other for module in new for other in imports(module)} - found
    return found


def test_every_module_on_the_way_of_a_log_prob_is_digested_or_known_to_decide_no_bit() -> None:
    digested = {name_of(file) for file in scoring_files()}
    packages = {module for module in on_the_way() if (ROOT / module.replace(".", "/") / "__init__.py").exists()}
    assert on_the_way() - packages - digested == set(DECIDE_NO_BIT)
    assert {"models.attention", "kernels.attention._fork_kernels", "kernels.row_logps.fast", "records"} < digested
    assert all((ROOT / name).exists() for name in code.SCORING)


def test_start_scores_by_nothing_else() -> None:
    """`Start.score` hands on to train/score.py, so no line of train/setup.py decides a bit."""
    source = statements((ROOT / "train/setup.py").read_text())
    assert "return score(self.policy, self.head, batch)" in source and "hidden_rows" not in source


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's files that are digested."""
    for file in scoring_files():
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    monkeypatch.setattr(code, "_ROOT", tmp_path)
    return tmp_path


def digest() -> str:
    return scoring_digest.__wrapped__()


def test_a_change_of_any_digested_file_changes_the_digest(tree: Path) -> None:
    seen = [digest()]
    assert seen == [scoring_digest()]
    for file in scoring_files():
        source = file.read_text()
        file.write_text(source + "\n_changed = 1\n")
        seen.append(digest())
        file.write_text(source)
    assert len(set(seen)) == len(seen)
    (tree / "kernels/attention/new.py").write_text("")  # what lies in those folders is digested without being named
    assert digest() not in seen


def test_one_number_in_a_kernel_is_other_code_and_a_comment_is_not(tree: Path) -> None:
    before = digest()
    kernel = tree / "kernels/attention/_fork_kernels.py"
    source = kernel.read_text()
    kernel.write_text(source.replace('"""Scores to the base of 2', '"""# Other words.') + "# a comment\n")
    assert kernel.read_text() != source + "# a comment\n" and digest() == before
    kernel.write_text(source.replace("1.4426950408889634", "1.4426950408889635"))
    assert kernel.read_text() != source and digest() != before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 1", "x = 1  # one", True),
        ("x = (1,\n     2)", "x = (1, 2)", True),
        ('def f():\n    """Says."""\n    return 1', "def f():\n    return 1", True),
        ('"""Says."""\nx = 1', "x = 1", True),
        ('x = 1\n"""What x is."""', "x = 1", True),
        ('def f():\n    """Does nothing."""', "def f():\n    pass", True),
        ("x = 1", "x = 2", False),
        ('x = "1"', "x = 1", False),
        ('def f():\n    return """Says."""', "def f():\n    return", False),
        ("a - b - c", "a - (b - c)", False),
    ],
)
def test_what_counts_is_what_is_done(one: str, other: str, same: bool) -> None:
    assert (statements(one) == statements(other)) == same


def test_the_librarys_code_of_a_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, qwen = tiny_model("llama"), tiny_model("qwen2")
    before = model_code_digest(llama)
    assert before == model_code_digest(tiny_model("llama", seed=1)) != model_code_digest(qwen)
    source = Path(sys.modules[type(llama).__module__].__file__ or "").read_text()
    monkeypatch.setattr(
        "inspect.getsource", lambda module: source.replace("** -0.5", "** -0.4").replace("**-0.5", "**-0.4")
    )
    assert model_code_digest(llama) != before
