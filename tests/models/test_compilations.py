"""What was compiled or tuned is told once, with what asked for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tuningfork.models import compilations
from tuningfork.models.compilations import Compilation, Compilations


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_graph_is_told_once_with_the_guard_that_failed():
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager", dynamic=False)
    seen, other = Compilations(), Compilations()
    assert seen.taken() == []
    compiled(torch.zeros(3))
    (first,) = seen.taken()
    assert "double (test_compilations.py:" in first.what and first.cause == ""
    compiled(torch.zeros(3))
    assert seen.taken() == []
    compiled(torch.zeros(4))
    (again,) = seen.taken()
    assert "size mismatch at index 0. expected 3, actual 4" in again.cause and again.cause in str(again)
    assert other.taken() == [first, again]
    assert Compilations().taken() == []


def test_a_backward_pass_that_is_compiled_when_it_first_runs_is_told():
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="aot_eager", dynamic=False)
    out = compiled(torch.ones(3, requires_grad=True))
    seen = Compilations()
    out.sum().backward()
    assert [what.what for what in seen.taken()] in (
        [],
        ["the backward pass of graph 0/0 was compiled, which then first ran"],
    )


def test_more_than_pytorch_keeps_is_not_an_error(monkeypatch):
    made = SimpleNamespace(is_runtime=True, compile_id="0/0")
    kept = [made, made]
    monkeypatch.setattr(compilations, "get_compilation_metrics", lambda: kept)
    seen = Compilations()
    kept[:] = [SimpleNamespace(is_runtime=True, compile_id="1/0") for _ in range(64)]  # the last one is gone
    assert [what.what for what in seen.taken()] == ["kernels of graph 1/0 were tuned"] * 64
    assert seen.taken() == []


def _told(rows: object, width: int, attributes: dict, warps: int = 4) -> dict:
    """As Triton tells its hook of a kernel with arguments x, rows, WIDTH."""
    return {
        "signature": {"x": "*bf16", "rows": "constexpr" if rows == 1 else "i32", "WIDTH": "constexpr"},
        "constants": {(2,): width} | ({(1,): 1} if rows == 1 else {}),
        "configs": [attributes],
        "num_warps": warps,
        "num_stages": 2,
        "num_ctas": 1,
    }


def test_a_kernel_says_which_arguments_are_others_than_before(monkeypatch):
    monkeypatch.setattr(compilations, "_forms", {})
    aligned = [["tt.divisibility", 16]]
    forms = [
        _told(64, 96, {(0,): aligned, (1,): aligned}),
        _told(63, 96, {(0,): aligned, (1,): []}),
        _told(1, 96, {(0,): aligned}),
        _told(63, 128, {(0,): aligned}, warps=8),
    ]
    found = [compilations._of_kernel("scan", "the kernel", told).cause for told in forms]
    assert found == ["its first form", "rows is i32", "rows is 1", "WIDTH is 128, num_warps is 8"]
    assert compilations._of_kernel("scan", "another", forms[0]) == Compilation(
        "kernel scan was compiled", "its first form"
    )


def test_triton_tells_of_kernels_that_it_compiles():
    """For a card that is not there: Triton compiles for it all the same."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret or torch.cuda.is_available():
        pytest.skip("needs the compiler, and no card: with one, tests/gpu has this")
    from tests.models.kernels_of_triton import offset, without_a_card

    seen = Compilations()
    with without_a_card():
        for rows in (64, 32, 33):
            offset.warmup(torch.float32, rows, SIZE=32, grid=(1,))
    assert seen.taken() == [
        Compilation("kernel offset was compiled", "its first form"),
        Compilation("kernel offset was compiled", "rows is i32"),
    ]


def test_triton_tells_of_kernels_that_it_tunes():
    """Once for each length, though nothing is compiled for it: its key alone is new."""
    triton = pytest.importorskip("triton")
    from tests.models.kernels_of_triton import scaled

    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1, for nothing is launched without a card; tests/gpu has this")
    seen = Compilations()
    for rows in (5, 7, 5):
        x = torch.ones(8)
        scaled[(1,)](x, rows)
        assert 1 < x[0] == x[rows - 1] and x[rows:].eq(1).all()
    assert [str(what) for what in seen.taken()] == [
        f"kernel scaled was tuned, 2 configurations: the first with rows {rows}" for rows in (5, 7)
    ]
