"""Test-wide settings: offline, one thread (tiny tensors only lose by more), GPU tests skipped where there is none."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def uncompiled():
    """torchao compiles its step for each shape of weight, which takes a CPU half a minute."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
