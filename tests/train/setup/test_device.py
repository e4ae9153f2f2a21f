"""TF32: where it is refused, and what switches it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tuningfork.errors import ConfigError
from tuningfork.models.config import ModelConfig
from tuningfork.train.setup.device import check_tf32, real_float32, set_tf32

WANTED = ModelConfig(dtype="float32", tf32=True)


@pytest.fixture(autouse=True)
def put_back() -> Any:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_is_refused_where_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tf32(ModelConfig(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="runs on a CPU, which has no TF32"):
        check_tf32(WANTED, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *of: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *of: (7, 5))
    with pytest.raises(ConfigError, match="Tesla T4 has no TF32"):
        check_tf32(WANTED, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *of: (8, 0))
    check_tf32(WANTED, torch.device("cuda"))


def test_both_of_pytorchs_switches_say_the_same_and_checks_have_real_float32() -> None:
    for on, words in ((True, ("high", "tf32", True)), (False, ("highest", "ieee", False))):
        set_tf32(on)
        of_cuda = torch.backends.cuda.matmul
        assert (torch.get_float32_matmul_precision(), of_cuda.fp32_precision, of_cuda.allow_tf32) == words
        with real_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == words[0]
