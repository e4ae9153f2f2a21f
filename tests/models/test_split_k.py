"""When products are switched to go without split-K; what they are on a GPU is in tests/gpu/test_products.py."""

import os
import subprocess
import sys

import pytest
import torch

from tuningfork.models import split_k
from tuningfork.models.split_k import forgo_workspace, running_without_split_k, without_split_k

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Library:
    """What PyTorch keeps of cuBLAS, as a GPU's build of it has it: setting the other interface is noted."""

    def __init__(self) -> None:
        self.name, self.changes = "Cublas", []

    def __str__(self) -> str:
        return f"_BlasBackend.{self.name}"

    def __call__(self, name=None):
        if name is not None:
            self.name = {"cublas": "Cublas", "cublaslt": "Cublaslt"}[name]
            self.changes.append(name)
        return self


def cut() -> list[bool]:
    matmul = torch.backends.cuda.matmul
    return [getattr(matmul, f"allow_{kind}_reduced_precision_reduction_split_k") for kind in ("bf16", "fp16")]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", found)
    monkeypatch.setattr(split_k, "_forgone", None)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pass_in_16_bits_goes_without_and_leaves_all_as_it_was(library, dtype) -> None:
    with without_split_k(CUDA, dtype):
        with without_split_k(CUDA, dtype):
            assert library.name == "Cublaslt" and cut() == [False, False]
        assert library.name == "Cublaslt" and cut() == [False, False]
    assert library.name == "Cublas" and cut() == [True, True]


def test_a_pass_that_fails_leaves_all_as_it_was(library) -> None:
    def fail() -> None:
        assert cut() == [False, False]
        raise KeyError

    with pytest.raises(KeyError):
        running_without_split_k(fail, CUDA, torch.bfloat16)()
    assert library.name == "Cublas" and cut() == [True, True]


def test_what_is_preferred_already_is_not_set_again(library) -> None:
    """PyTorch would warn."""
    library.name = "Cublaslt"
    with without_split_k(CUDA, torch.bfloat16):
        assert cut() == [False, False]
    assert library.changes == [] and library.name == "Cublaslt"


@pytest.mark.parametrize(("device", "dtype"), [(CPU, torch.bfloat16), (CPU, torch.float32), (CUDA, torch.float32)])
def test_nothing_is_switched_on_a_cpu_or_for_float32(library, device, dtype) -> None:
    def run() -> None:
        raise AssertionError

    assert running_without_split_k(run, device, dtype) is run
    with without_split_k(device, dtype):
        assert cut() == [True, True]
    assert library.changes == []


def test_a_process_without_a_workspace_needs_no_switch(library) -> None:
    """And cuBLASLt, which has it, would fail there."""
    library.name = "Cublaslt"
    forgo_workspace()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["CUBLASLT_WORKSPACE_SIZE"]) == (":0:0", "0")
    with without_split_k(CUDA, torch.bfloat16):
        assert library.name == "Cublas"


def test_behind_a_pass_in_16_bits_the_workspace_stays(library) -> None:
    """The library has it by then."""
    with without_split_k(CUDA, torch.bfloat16):
        pass
    forgo_workspace()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with without_split_k(CUDA, torch.bfloat16):
        assert library.name == "Cublaslt"


def test_the_command_line_has_pytorch_prefer_what_has_the_switch() -> None:
    """Before PyTorch is imported: afterwards it would warn."""
    script = (
        "import os, sys; sys.argv = ['tuningfork', '--version']; from tuningfork.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(os.environ['TORCH_BLAS_PREFER_CUBLASLT'], 'torch' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if name != "TORCH_BLAS_PREFER_CUBLASLT"}
    said = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert said.split()[-2:] == ["1", "False"]
