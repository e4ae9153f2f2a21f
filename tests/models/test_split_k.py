"""When products are switched to go without split-K; what they are on a GPU is in tests/gpu/test_products.py."""

import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch

from tests.tiny import one_pack, random_pairs, scorer_of, tiny_policy
from tuningfork.models import head, split_k
from tuningfork.models.split_k import choose_library, running_without_split_k, without_split_k

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
    monkeypatch.setattr(split_k, "_workspace", None)
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


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.bfloat16, "cublaslt"), (torch.float32, "cublas")])
def test_a_run_has_the_interface_of_its_dtype_and_a_workspace(library, dtype, chosen) -> None:
    library.name = "Cublas" if chosen == "cublaslt" else "Cublaslt"
    choose_library(CUDA, dtype, exact=dtype == torch.bfloat16)
    assert library.changes == [chosen] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_run_in_float32_that_compares_bits_has_none_and_a_later_one_in_16_bits_no_switch(library) -> None:
    """cuBLASLt, which has it, would fail there."""
    choose_library(CUDA, torch.float32, exact=True)
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["CUBLASLT_WORKSPACE_SIZE"]) == (":0:0", "0")
    choose_library(CUDA, torch.bfloat16, exact=True)
    with without_split_k(CUDA, torch.bfloat16):
        assert library.name == "Cublas" and library.changes == []


@pytest.mark.parametrize("first", ["a run", "a pass", "the user's own"])
def test_a_workspace_that_is_there_stays(library, monkeypatch, first) -> None:
    if first == "a run":
        choose_library(CUDA, torch.float32, exact=False)
    elif first == "a pass":
        with without_split_k(CUDA, torch.bfloat16):
            pass
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    choose_library(CUDA, torch.float32, exact=True)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":0:0"
    with without_split_k(CUDA, torch.bfloat16):
        assert library.name == "Cublaslt"


@pytest.mark.parametrize("mode", ["none", "block", "offload"])
def test_forward_passes_of_a_policy_do_without_and_backward_passes_do_not(library, monkeypatch, mode) -> None:
    """On a CPU that is told to have the switch. Blocks that are computed again do without, and so do logits."""
    monkeypatch.setattr(split_k, "_has_switch", lambda *_: True)
    policy, seen = tiny_policy("llama", torch.float32), defaultdict(list)
    mlp = type(policy.blocks[0].mlp)
    forward, logits = mlp.forward, head.product

    def noted(what, run):
        return lambda *args, **how: seen[what].append(cut()) or run(*args, **how)

    monkeypatch.setattr(mlp, "forward", noted("block", forward))
    monkeypatch.setattr(head, "product", noted("logits and their gradients", logits))
    policy.model.get_input_embeddings().register_forward_hook(lambda *_: seen["embedding"].append(cut()))
    policy.blocks[0].mlp.down_proj.weight.register_hook(lambda _: seen["gradient"].append(cut()))
    policy.keep_activations(mode)
    scorer_of(policy).backward(one_pack(random_pairs(3), "prompt"), lambda a, b, logps: logps.sum())
    whole, parts = [False, False], [True, True]
    assert seen["embedding"] == [whole] and seen["gradient"] == [parts]
    assert seen["block"] == [whole] * len(policy.blocks) * (1 if mode == "none" else 2)
    assert seen["logits and their gradients"] == [whole, *[parts] * (len(seen["logits and their gradients"]) - 1)]


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
