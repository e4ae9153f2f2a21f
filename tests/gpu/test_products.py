"""A row of a matrix product has the same bits whatever number of rows there are, on a GPU."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear

from tuningfork.models.split_k import choose_library, running_without_split_k, without_split_k

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Inputs and outputs: of gates, decays, and keys of few heads, where outputs are fewest for what there is to sum up; and
# of a block's large matrices.
SHAPES = [(n, m) for n in (32, 256, 768, 2048, 3840, 8192) for m in (2, 12, 30, 36, 64, 96, 128, 512)]
SHAPES += [(768, 768), (3072, 768), (2048, 2048), (8192, 2048), (3840, 5760), (11008, 3840)]
ROWS = [1024, 1152, 1280, 1536, 2048, 3072, 4096, 6912, 8192]


def varying(dtype: torch.dtype, context) -> list:
    """The shapes whose first rows have other bits among fewer rows, in any of three products."""
    found = []
    torch.manual_seed(0)
    for inputs, outputs in SHAPES:
        x, weight = (torch.randn(n, inputs, device=CUDA, dtype=dtype) for n in (10_000, outputs))
        bias = torch.randn(outputs, device=CUDA, dtype=dtype)
        products = {
            "mm": lambda x, w=weight: x @ w.mT,
            "with bias": lambda x, w=weight, b=bias: linear(x, w, b),
            "of two": lambda x, w=weight: torch.bmm(torch.stack([x, x]), torch.stack([w, w]).mT)[1],
        }
        for name, product in products.items():
            with context():
                whole = product(x)
                if not all(torch.equal(product(x[:rows]), whole[:rows]) for rows in ROWS):
                    found.append((inputs, outputs, name))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_among_any_rows(dtype):
    assert varying(dtype, lambda: without_split_k(CUDA, dtype)) == []
    if torch.cuda.get_device_capability() == (9, 0):  # otherwise this test shows nothing
        assert (3840, 30, "mm") in varying(dtype, nullcontext)


def test_a_row_has_the_same_bits_in_float32_without_a_workspace():
    """In a process of its own, for cuBLAS asks for its workspace once."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.test_products"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=300).stdout == "[]\n"


def test_a_backward_pass_has_what_the_process_had():
    """Its sums over rows are cut; a block that it computes again is not, and both leave all as it was."""

    def state():
        matmul = torch.backends.cuda.matmul
        kinds = (getattr(matmul, f"allow_{kind}_reduced_precision_reduction_split_k") for kind in ("bf16", "fp16"))
        return str(torch.backends.cuda.preferred_blas_library()), *kinds

    seen = []
    before = state()
    run = running_without_split_k(lambda x: seen.append(state()) or x.exp(), CUDA, torch.bfloat16)
    x = torch.ones(2, device=CUDA, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    y.register_hook(lambda grad: seen.append(state()))
    y.sum().backward()
    cut = "_BlasBackend.Cublaslt", False, False
    assert seen == [cut, before, cut]
    assert state() == before


if __name__ == "__main__":
    choose_library(CUDA, torch.float32, exact=True)
    print(varying(torch.float32, nullcontext))
