"""Test-wide settings: offline, one thread (tiny tensors only lose by more), GPU tests skipped where there is none."""

from __future__ import annotations

import os
import sys
from typing import Any

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


_missing: dict[str, str] = {}
"""Package -> why a process of this run could not fetch it."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    fetcher = sys.modules.get("tests.real_tokenizers")
    _missing.update(fetcher.missing if fetcher is not None else {})
    if hasattr(session.config, "workeroutput"):  # one of several processes: the first one tells of all
        session.config.workeroutput["missing"] = _missing


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _missing.update(getattr(node, "workeroutput", {}).get("missing", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which published packages were not to be had: a row of skipped tests is easily overlooked."""
    if _missing:
        terminalreporter.section("NOT TESTED, since it could not be fetched", yellow=True)
        for reason in _missing.values():
            terminalreporter.line(reason)
