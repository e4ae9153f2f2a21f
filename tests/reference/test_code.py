"""The digest of the code that scores: every module on a log-prob's way is in it, and only what is done counts."""

from __future__ import annotations

import io
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests.test_architecture import ROOT, imports, name_of
from tests.tiny import limits_of, one_pack, random_pairs, scorer_of, tiny_model, tiny_policy
from tuningfork.models.hf.load import Loaded
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.recipe.run_config import RunConfig
from tuningfork.records import PackedBatch
from tuningfork.reference import code
from tuningfork.reference.code import model_code_digest, scoring_digest, scoring_files, statements
from tuningfork.reference.config import ReferenceConfig
from tuningfork.report.run.console import Console
from tuningfork.train.session import Session
from tuningfork.train.setup.reference import open_reference

# From token ids and a model folder to a log-prob.
STEPS = (
    "data.packing.pack",
    "data.packing.layout",
    "models.hf.load",
    "models.policy",
    "kernels.select",
    "models.even",
    "models.head",
    "models.scorer",
)
DECIDE_NO_BIT = {
    "accounts": "which rows are used, and which dropped",
    "errors": "what a user can mend",
    "wording": "words",
    "files": "opens files that are whole",
    "json_files": "reads small files with bounds",
    "ranges": "names phases for a profiler, around passes that are the same without",
    "models.hf.checks": "refuses what is wrong in a model's files",
    "models.config": "what a setting may be",
    "models.hf.digests": "refuses an export that was spoilt",
    "models.flops": "counts what a token costs",
    "models.hf.own": "which classes transformers knows by a type; their files are digested",
    "models.hf.kinds": "makes a class of another and a forward, which are digested where they stand",
    "models.hf.folder": "what lies beside the weights; the model's config is in the fingerprint",
    "models.hf.comparable": "which configs are of one model; the model's config is in the fingerprint",
    "models.hf.released": "which of a folder's tensors are which of the model's, which are digested in memory",
    "models.hf.support": "refuses models, and examples that are too long for one",
    "models.hf.tokenizer_file": "refuses tokenizers that ask for too much",
    "models.hf.trust": "refuses folders that ask for code of others",
    "models.hf.safetensors_reader": "brings weights into memory, where they are digested",
    "data.packing.bin_packing": "which pack an example lies in; no start lets this change its log-prob",
    "data.packing.portions": "which examples share a pack, and so what they begin with; likewise",
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
    assert {"models.hf.attention", "kernels.attention._fork_kernels", "kernels.row_logps.fast", "records"} < digested
    assert all((ROOT / name).exists() for name in code.SCORING)


@pytest.mark.parametrize("mode", ["none", "block", "offload"])
def test_every_file_that_runs_for_a_log_prob_is_digested(mode: str) -> None:
    """From a model in memory and tokens, whatever it imports."""
    model, ran = tiny_model("gemma2", torch.float32), set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        ran.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        policy = Policy.fast(model, torch.float32)
        policy.keep_activations(mode)
        scorer_of(policy).score(one_pack(random_pairs(3), share="prompt"))
    finally:
        sys.setprofile(before)
    files = {Path(name) for name in ran if Path(name).is_relative_to(ROOT)}
    assert ROOT / "models/policy.py" in files and files - set(scoring_files()) == {ROOT / "errors.py"}


def test_start_scores_by_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes into the cache is what the scorer says of the policy, so train/setup.py decides no bit."""
    policy, examples = tiny_policy("llama", torch.float32), random_pairs(5)
    objective, loaded = ObjectiveConfig().build(), Loaded(policy.model, torch.float32)
    session = Session(scorer_of(policy), objective, loaded)
    scored: list[PackedBatch] = []

    def noted(scorer: Scorer, pack: PackedBatch) -> torch.Tensor:
        assert scorer is session.scorer
        scored.append(pack)
        return torch.tensor([-1.0 - len(answer.ids) for e in pack.examples for answer in e.answers]).double()

    monkeypatch.setattr(Scorer, "score", noted)
    store = open_reference(
        RunConfig(reference=ReferenceConfig(str(tmp_path))), session, examples, limits_of(), Console(io.StringIO())
    )
    assert store.lookup(examples).tolist() == [-1.0 - len(answer.ids) for e in examples for answer in e.answers]
    assert sorted(e.id for pack in scored for e in pack.examples) == sorted(e.id for e in examples)


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


def test_a_change_of_any_digested_file_changes_the_digest(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "statements", cache(code.statements))  # each source is read once, not once a file
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
    kernel.write_text(source.replace('"""Some rows of one head', '"""# Other words') + "# a comment\n")
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
        ('class E(Exception):\n    """Says."""\nx = 1', 'class E(Exception):\n    """Says\n    more."""\nx = 1', True),
        ("x = 1\nf'{x}'", "x = 1", False),
        ("f'{x:>{y}}'", "f'{x:>{z}}'", False),
        ("f'a  b'", "f'a b'", False),
        ("if a:\n    b\nc", "if a:\n    b\n    c", False),
        ("if a:\n  b", "if a:\n    b", True),
        ("x = 1", "x = 2", False),
        ('x = "1"', "x = 1", False),
        ('def f():\n    return """Says."""', "def f():\n    return", False),
        ("a - b - c", "a - (b - c)", False),
    ],
)
def test_what_counts_is_what_is_done(one: str, other: str, same: bool) -> None:
    assert (statements(one) == statements(other)) == same


def test_it_is_the_same_in_every_python() -> None:
    """Word for word, so that a newer Python on which this suite runs shows here if it cuts a source up otherwise."""
    source = '''"""Doc é."""
x = f"é { a!r:>{w}} {{x}} {'é' + f'{b}'}" "plain" f"""two
  { c = } lines"""; y = rb"z"
"text on its own"
f"{does()}"
def f(a, *, b=1_000, c=0xFF) -> "int":
    # a comment
    """Doc
    more"""
    if a: return (1,
       2)  # a comment
    é = a if b else \\
        F'{c}'
    @decor
    class K: ...
    match a:
        case [1, *_]: pass

    return lambda: (yield)
async def g(): await h'''
    assert (
        statements(source)
        == '''x = f"é { a!r:>{w}} {{x}} {'é' + f'{b}'}" "plain" f"""two
  { c = } lines""" ; y = rb"z"
f"{does()}"
def f ( a , * , b = 1_000 , c = 0xFF ) -> "int" :
 if a : return ( 1 , 2 )
 é = a if b else F'{c}'
 @ decor
 class K : ...
 match a :
  case [ 1 , * _ ] : pass
 return lambda : ( yield )
async def g ( ) : await h'''
    )


def test_the_librarys_code_of_a_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, qwen = tiny_model("llama"), tiny_model("qwen2")
    before = model_code_digest(llama)
    assert before == model_code_digest(tiny_model("llama", seed=1)) != model_code_digest(qwen)
    source = Path(sys.modules[type(llama).__module__].__file__ or "").read_text()
    monkeypatch.setattr(
        "inspect.getsource", lambda module: source.replace("** -0.5", "** -0.4").replace("**-0.5", "**-0.4")
    )
    assert model_code_digest(llama) != before
