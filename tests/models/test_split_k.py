"""What a CPU is spared of products without split-K; what they are on a GPU is in tests/gpu/test_products.py."""

import os
import subprocess
import sys

import torch

from tuningfork.models.split_k import running_without_split_k, without_split_k


def test_nothing_is_switched_on_a_cpu_or_for_float32() -> None:
    def run() -> None:
        raise AssertionError

    for device, dtype in [("cpu", torch.bfloat16), ("cpu", torch.float32), ("cuda", torch.float32)]:
        assert running_without_split_k(run, torch.device(device), dtype) is run
        before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        with without_split_k(torch.device(device), dtype):
            assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == before


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
