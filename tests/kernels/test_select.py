"""The choice of kernels: on a CPU always the plain ones, and each with a name for the log and the fingerprint."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tuningfork import kernels
from tuningfork.errors import ModelError
from tuningfork.kernels import select as select_module
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import plain, select

ASKED = {"attention": {"head_width": 64}, "row_logps": {}}
ALL = {path.name for path in Path(kernels.__file__).parent.iterdir() if (path / "plain.py").exists()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_cpu_gets_the_plain_kernels(dtype):
    chosen = select(ASKED, torch.device("cpu"), dtype)
    assert chosen == plain(ASKED)
    assert chosen["attention"] is PlainAttention
    assert chosen["row_logps"] is plain_rows
    assert chosen.names == {"attention": "plain", "row_logps": "plain"}


def test_float64_is_plain_on_a_gpu_too():
    """It is there to check against; no fast kernel computes in it."""
    assert select(ASKED, torch.device("cuda"), torch.float64) == plain(ASKED)


def test_there_are_forms_of_what_is_asked_for_and_of_nothing_else():
    """What a model does not use is no fact of its reference."""
    assert plain(["row_logps"]).names == select({"row_logps": {}}, torch.device("cpu"), torch.float32).names
    assert set(plain(["row_logps"]).forms) == {"row_logps"}


def test_every_op_has_forms():
    assert set(plain().forms) == set(select_module._FAST) == ALL


def test_heads_wider_than_the_gpus_kernel_are_refused(monkeypatch):
    fork = SimpleNamespace(WIDEST_HEAD=512, ForkAttention=object)
    rows = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "tuningfork.kernels.attention.fork", fork)  # the real one needs Triton
    monkeypatch.setitem(sys.modules, "tuningfork.kernels.row_logps.fast", rows)
    monkeypatch.setattr("tuningfork.kernels.row_logps.fast", rows, raising=False)
    chosen = select({**ASKED, "attention": {"head_width": 512}}, torch.device("cuda"), torch.bfloat16)
    assert chosen.names == {"attention": "fork", "row_logps": "triton"}
    assert (chosen["attention"], chosen["row_logps"]) == (fork.ForkAttention, rows)
    with pytest.raises(ModelError, match="heads up to 512 wide, these have 513"):
        select({"attention": {"head_width": 513}}, torch.device("cuda"), torch.bfloat16)


def test_convolutions_wider_than_the_gpus_kernel_are_refused(monkeypatch):
    fast = SimpleNamespace(WIDEST=4, TritonCausalConv=object)
    monkeypatch.setitem(sys.modules, "tuningfork.kernels.causal_conv.fast", fast)  # the real one needs Triton
    chosen = select({"causal_conv": {"width": 4}}, torch.device("cuda"), torch.bfloat16)
    assert (chosen.names, chosen["causal_conv"]) == ({"causal_conv": "triton"}, fast.TritonCausalConv)
    with pytest.raises(ModelError, match="up to 4 tokens, these have 5"):
        select({"causal_conv": {"width": 5}}, torch.device("cuda"), torch.bfloat16)


def test_keys_wider_than_the_gpus_scan_are_refused(monkeypatch):
    fast = SimpleNamespace(WIDEST_KEY=128, TritonGatedDelta=object)
    monkeypatch.setitem(sys.modules, "tuningfork.kernels.gated_delta.fast", fast)  # the real one needs Triton
    asked = {"gated_delta": {"key_width": 128, "value_width": 256}}
    chosen = select(asked, torch.device("cuda"), torch.bfloat16)
    assert (chosen["gated_delta"], chosen.names) == (object, {"gated_delta": "triton"})
    with pytest.raises(ModelError, match="keys up to 128 wide, these have 160, beside values of 64"):
        select({"gated_delta": {"key_width": 160, "value_width": 64}}, torch.device("cuda"), torch.bfloat16)


def test_compressed_heads_and_convolutions_that_the_gpu_does_not_take_are_refused(monkeypatch):
    fast = SimpleNamespace(WIDEST=4, WIDEST_HEAD=128, TritonCcgqa=object)
    monkeypatch.setitem(sys.modules, "tuningfork.kernels.ccgqa.fast", fast)  # the real one needs Triton
    asked = {"head_width": 128, "depthwise": 4, "grouped": 4}
    assert select({"ccgqa": asked}, torch.device("cuda"), torch.bfloat16).names == {"ccgqa": "triton"}
    for wrong, words in (({"grouped": 5}, "of 4 and 5 tokens"), ({"head_width": 256}, "are 256 wide")):
        with pytest.raises(ModelError, match=words):
            select({"ccgqa": {**asked, **wrong}}, torch.device("cuda"), torch.bfloat16)
