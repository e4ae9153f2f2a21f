"""What pyproject.toml says of the package is so: its version, what it needs, and who may read that it has types."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import tuningfork
import tuningfork.__main__

ROOT = Path(tuningfork.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
ANOTHERS = {"yaml": "pyyaml", "pydantic_core": "pydantic", "triton": "torch"}  # modules that come with a package


def packages(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", requirement)[0].lower() for requirement in requirements}


def test_everything_that_is_imported_is_required():
    """A package that only comes with another one may stop to."""
    imported = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    foreign = imported - sys.stdlib_module_names - {"tuningfork"}
    optional = PROJECT["project"]["optional-dependencies"]["low-precision"]
    assert {ANOTHERS.get(name, name) for name in foreign} == packages([*PROJECT["project"]["dependencies"], *optional])


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tuningfork.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", tuningfork.__version__)
    elsewhere = [path for path in ROOT.rglob("*.py") if f'"{tuningfork.__version__}"' in path.read_text()]
    assert elsewhere == [ROOT / "__init__.py"]


def test_the_program_is_what_python_runs_as_the_package():
    assert PROJECT["project"]["scripts"] == {"tuningfork": "tuningfork.__main__:main"}
    assert callable(tuningfork.__main__.main)


def test_the_changelog_begins_with_this_version():
    changelog = ROOT.parent / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("there is none beside an installed package")
    assert re.findall(r"^## \[(.+?)\]", changelog.read_text(), re.MULTILINE)[0] == tuningfork.__version__


def test_pythons_that_are_named_are_those_that_are_allowed():
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert named[0] == least
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + least.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == least


def test_hooks_before_a_commit_run_what_make_check_runs():
    makefile = (ROOT.parent / "Makefile").read_text()
    checks = makefile.partition("\ncheck: ")[2].partition("\n\n")[0].splitlines()[1:]
    wanted = [line.strip().removeprefix("@").replace("$(VENV)", ".venv") for line in checks]
    [local] = yaml.safe_load((ROOT.parent / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == wanted


@pytest.mark.parametrize(
    "page", sorted(ROOT.parent.glob("*.md")) + sorted((ROOT.parent / "docs").glob("*.md")), ids=lambda path: path.name
)
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
