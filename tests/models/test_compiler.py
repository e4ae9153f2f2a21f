"""Weight gradients that leave their product in float32: what the compiler's pass replaces, and what it leaves."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
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


def passed(function, dtype=torch.bfloat16) -> list[str]:
    """The operators of a function's graph behind the pass."""
    with FakeTensorMode():
        graph = make_fx(function)(torch.empty(8, 8, dtype=dtype), torch.empty(8, 8, dtype=dtype)).graph
    compiler.Float32WeightGradients()(graph)
    graph.lint()
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_a_weights_gradient_comes_from_one_product():
    assert passed(gradient) == ["aten.permute.default", "aten.mm.dtype"]


@pytest.mark.parametrize("function", [used_twice, used_further, of_the_input])
def test_other_products_stay(function):
    assert "aten.mm.dtype" not in passed(function)


def test_a_product_in_float32_has_nothing_to_gain():
    assert "aten.mm.dtype" not in passed(gradient, torch.float32)


def joined_gradient(g, x):
    product = aten.mm(aten.permute(g, [1, 0]), x)
    parts = aten.slice(product, 0, 0, 3), aten.slice(product, 0, 3, 8)
    return tuple(prims.convert_element_type(part, torch.float32) for part in parts)


def one_part_used_otherwise(g, x):
    product = aten.mm(aten.permute(g, [1, 0]), x)
    return prims.convert_element_type(aten.slice(product, 0, 0, 3), torch.float32), aten.slice(product, 0, 3, 8)


def test_joined_weights_share_their_product():
    assert passed(joined_gradient) == ["aten.permute.default", "aten.mm.dtype", *["aten.slice.Tensor"] * 2]
    assert "aten.mm.dtype" not in passed(one_part_used_otherwise)


class Three(nn.Module):
    """Three linear layers of one input, and a fourth of another."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12, bias), nn.Linear(8, 4, bias), nn.Linear(8, 4, bias)
        self.d = nn.Linear(4, 8, bias)

    def forward(self, x):
        return x + self.d(torch.sigmoid(self.a(x)[..., :4]) * self.b(x) + self.c(x) * self.a(x)[..., 8:])


def run(bias: bool, autocast: bool, join: bool) -> tuple[int, list[torch.Tensor]]:
    """Matrix products of the forward graph, and the output with all gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, products = Three(bias), []

    def backend(graph, inputs):
        if join:
            compiler.JoinedLinears()(graph.graph)
            graph.graph.lint()
            graph.recompile()

        def forward(traced, _):
            products.append(sum(node.target in (aten.mm.default, aten.addmm.default) for node in traced.graph.nodes))
            return make_boxed_func(traced)

        return aot_autograd(fw_compiler=forward, bw_compiler=lambda traced, _: make_boxed_func(traced))(graph, inputs)

    x = torch.randn(1, 10, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = torch.compile(model, backend=backend, dynamic=True)(x)
    out.float().square().sum().backward()
    return products[0], [out.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_layers_of_one_input_become_one_product_with_the_same_bits(bias):
    apart, expected = run(bias, autocast=True, join=False)
    together, found = run(bias, autocast=True, join=True)
    assert (apart, together) == (5, 2)
    assert torch.equal(found[0], expected[0])
    # The gradient of a joined input, and of a weight used twice, is rounded to bfloat16 once instead of once a product.
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= 2**-7 * theirs.norm()


def test_weights_that_need_no_cast_are_not_copied_together():
    assert run(bias=False, autocast=False, join=True)[0] == run(bias=False, autocast=False, join=False)[0] == 5


def test_the_pass_is_for_gpus_which_alone_have_the_product():
    assert "post_grad_custom_pre_pass" in compiler.options(torch.device("cuda"))
    assert "post_grad_custom_pre_pass" not in compiler.options(torch.device("cpu"))
    assert compiler.options(torch.device("cpu"))["deterministic"]
