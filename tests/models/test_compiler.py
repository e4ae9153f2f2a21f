"""Weight gradients that leave their product in float32: what the compiler's pass replaces, and what it leaves."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tuningfork.models import compiler

aten, prims = torch.ops.aten, torch.ops.prims


def gradient(g, x):
    return prims.convert_element_type(aten.mm(aten.permute(g, [1, 0]), x), torch.float32)


def used_twice(g, x):
    product = aten.mm(aten.permute(g, [1, 0]), x)
    return prims.convert_element_type(product, torch.float32), aten.neg(product)


def used_further(g, x):
    return aten.neg(gradient(g, x))


def of_the_input(g, x):
    return prims.convert_element_type(aten.mm(g, aten.permute(x, [1, 0])), torch.float32)


def of_a_bfloat16_weight(g, x):
    return aten.mm(aten.permute(g, [1, 0]), x)


def passed(function, dtype=torch.bfloat16, wide=True) -> list[str]:
    """The operators of a function's graph behind the pass."""
    with FakeTensorMode():
        graph = make_fx(function)(torch.empty(8, 8, dtype=dtype), torch.empty(8, 8, dtype=dtype)).graph
    compiler.Float32WeightGradients(wide)(graph)
    graph.lint()
    (result,) = (node.args[0] for node in graph.find_nodes(op="output"))
    if isinstance(result, torch.fx.Node) and result.target is aten.mm.dtype:
        assert result.meta["val"].dtype == torch.float32
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_a_weights_gradient_comes_from_one_product():
    assert passed(gradient) == ["aten.permute.default", "aten.mm.dtype"]


def test_a_gradient_that_autograd_would_cast_behind_the_block_is_not_rounded_before():
    assert passed(of_a_bfloat16_weight) == ["aten.permute.default", "aten.mm.dtype"]
    assert passed(of_a_bfloat16_weight, wide=False) == ["aten.permute.default", "aten.mm.default"]
    assert passed(of_a_bfloat16_weight, torch.float32) == ["aten.permute.default", "aten.mm.default"]


@pytest.mark.parametrize("function", [used_twice, used_further, of_the_input])
def test_other_products_stay(function):
    assert "aten.mm.dtype" not in passed(function)


def test_a_product_in_float32_has_nothing_to_gain():
    assert "aten.mm.dtype" not in passed(gradient, torch.float32)


def test_blocks_share_a_graph_since_their_options_are_equal():
    cuda = torch.device("cuda")
    assert compiler.options(cuda) == compiler.options(cuda)
    assert compiler.options(cuda, True) != compiler.options(cuda, False)
    assert hash(compiler.Float32WeightGradients()) == hash(compiler.Float32WeightGradients())
    assert compiler.Float32WeightGradients(True).uuid() != compiler.Float32WeightGradients(False).uuid()


def test_the_pass_is_for_gpus_which_alone_have_the_product():
    assert "post_grad_custom_pre_pass" in compiler.options(torch.device("cuda"))
    assert "post_grad_custom_pre_pass" not in compiler.options(torch.device("cpu"))
    assert compiler.options(torch.device("cpu"))["deterministic"]
