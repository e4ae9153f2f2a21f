"""A run with TF32 products: when they are switched on, and what is written down of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.end_to_end.workbench import Job
from tuningfork.train import steps
from tuningfork.train.setup import model


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_a_run_has_it_behind_its_checks_and_another_reference(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had it: what is looked at is when the switch is set, and what is written down."""
    seen: dict[str, set[str]] = {"check": set(), "step": set()}

    def noting(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            seen[name].add(torch.get_float32_matmul_precision())
            return function(*given, **named)

        return call

    monkeypatch.setattr(model, "check_packed_equals_alone", noting("check", model.check_packed_equals_alone))
    monkeypatch.setattr(model, "check_head", noting("check", model.check_head))
    monkeypatch.setattr(steps, "train_step", noting("step", steps.train_step))
    plain = job.but({"train.max_steps": 1, "model.dtype": "float32"})
    plain.done()
    assert seen == {"check": {"highest"}, "step": {"highest"}} and len(list(plain.cache.iterdir())) == 1
    with_it = plain.elsewhere("with").but({"model.tf32": True})
    assert "model.tf32 is true, but this runs on a CPU" in with_it.refused()
    for place in ("tuningfork.commands.train", "tuningfork.train.setup.model"):
        monkeypatch.setattr(f"{place}.check_tf32", lambda *of: None)
    seen["step"].clear()
    assert "computing in float32, products in TF32" in with_it.done().out
    assert seen == {"check": {"highest"}, "step": {"high"}}
    assert "tf32: true" in (with_it.run / "config.yaml").read_text() and len(list(plain.cache.iterdir())) == 2
    assert "model.tf32: the run has True, now False, the default" in plain.elsewhere("with").refused(
        "train", "--resume"
    )
