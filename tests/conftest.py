"""Test-wide settings: offline, one thread (tiny tensors only lose by more), GPU tests skipped where there is none."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# An example takes as long as the machine is busy; how fast code is belongs in bench/.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


LONGEST = (
    "tests/distributed/test_weights.py",
    "tests/bench/test_bench.py",
    "tests/end_to_end/test_resume.py",
    "tests/data/tokens/test_as_text.py",
    "tests/distributed/test_sharding.py",
    "tests/train/checks/test_kernel_check.py",
    "tests/distributed/test_tensor.py",
    "tests/end_to_end/test_launch.py",
    "tests/data/tokens/test_bounded.py",
    "tests/commands/test_launch.py",
    "tests/data/tokens/test_agents.py",
    "tests/test_alone_equals_packed.py",
    "tests/test_hybrid_alone_equals_packed.py",
    "tests/kernels/test_plain_attention.py",
    "tests/models/test_activations.py",
    "tests/end_to_end/test_reference.py",
    "tests/data/tokens/test_workers.py",
)
"""The files that take half a minute of processor time or nearly so. They come first, where a process has whole files:
one that comes last is waited for. Needs `--no-loadscope-reorder`, or the files with the most tests come first."""


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: tests wait for processes of their own for an eighth of the time."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.location[0], len(LONGEST)))  # others stay in their order
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """What is imported and collected now stays to the end: 650,000 objects, which Python need not look through each
    time that it, or the start of a run, collects garbage."""
    gc.collect()
    gc.freeze()


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
