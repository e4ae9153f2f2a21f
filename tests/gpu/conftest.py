"""GPU tests only: compilers and kernels of other projects warn of their own affairs, which are no errors of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The compiler's pool of workers takes longer to start than these small kernels take to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is filled with NaN, so that an element that a kernel leaves unwritten cannot pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
