"""Test-wide settings: offline, one thread (tiny tensors only lose by more), GPU tests skipped where there is none."""

from __future__ import annotations

import os
import sys

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which published packages were not to be had: a row of skipped tests is easily overlooked."""
    fetcher = sys.modules.get("tests.real_tokenizers")
    if fetcher is not None and fetcher.missing:
        terminalreporter.section("NOT TESTED, since it could not be fetched", yellow=True)
        for reason in fetcher.missing.values():
            terminalreporter.line(reason)
