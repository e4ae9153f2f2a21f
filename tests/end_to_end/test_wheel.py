"""The package as it is installed: a wheel, built from a copy of the source, in a folder outside of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import tuningfork
from tests.end_to_end.workbench import Job

SOURCE = Path(tuningfork.__file__).parent
NEEDED = ("pyproject.toml", "README.md", "LICENSE")  # beside the package

pytest.importorskip("setuptools", "77", reason="a wheel is built by setuptools 77 or newer")


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The output of a program that must succeed, which sees no other tuningfork than that in `path`."""
    environment = os.environ | {"PYTHONPATH": str(path or ""), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(SOURCE, source / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED:
        shutil.copy(SOURCE.parent / name, source)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source)
    run(sys.executable, "-m", "pip", *build, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    options = ("--quiet", "--no-deps", "--no-index", "--target", target)
    run(sys.executable, "-m", "pip", "install", *options, wheel, cwd=wheel.parent)
    return target


def test_every_file_of_the_package_is_in_its_wheel(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {
        str(path.relative_to(SOURCE.parent))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == ours
    assert {f"{SOURCE.name}/py.typed", f"{SOURCE.name}/recipe/hints.yaml"} <= held


def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    said = Parser().parsestr(archive.read(about).decode())
    assert (said["Name"], said["Version"]) == ("tuningfork", tuningfork.__version__)
    assert said["License-Expression"] == "Apache-2.0" and said.get_all("License-File") == ["LICENSE"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().strip() == (SOURCE.parent / "README.md").read_text().strip()
    assert said["Summary"] and said["Keywords"] and said["Requires-Python"] and said.get_all("Classifier")


def test_an_installed_package_trains(job: Job, installed, tmp_path):
    """Two steps, by the program that the installation has made, from a folder that holds nothing of the source."""
    away = tmp_path / "away"
    away.mkdir()
    where = run(sys.executable, "-c", "import tuningfork; print(tuningfork.__file__)", cwd=away, path=installed)
    assert Path(where.strip()) == installed / "tuningfork" / "__init__.py"
    program = (sys.executable, installed / "bin" / "tuningfork")
    assert "tuningfork train recipe.yaml" in run(*program, "--help", cwd=away, path=installed)
    assert tuningfork.__version__ in run(*program, "--version", cwd=away, path=installed)
    recipe: dict[str, dict[str, object]] = {}
    for key, value in (job.settings | {"train.max_steps": 2, "data.workers": 1}).items():
        section, name = key.split(".")
        recipe.setdefault(section, {})[name] = str(value) if isinstance(value, Path) else value
    (away / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run(*program, "train", "recipe.yaml", cwd=away, path=installed)
    assert [line["step"] for line in job.metrics()] == [1, 2]
    assert job.exported().keys()
