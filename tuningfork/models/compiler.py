"""What we ask of torch.compile: the same bits from every graph, few and large products, float32 weight gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims


def options(device: torch.device) -> dict[str, Any]:
    """Options of torch.compile for decoder blocks on a device.

    A reduction must add in the same order in every graph, or the margin at step 0 is not 0. By default the compiler
    times several orders on the device and keeps the fastest, anew for every graph.
    """
    known = torch._inductor.config
    chosen: dict[str, Any] = {name: True for name in ("deterministic", "batch_invariant") if hasattr(known, name)}
    chosen["pre_grad_custom_pass"] = JoinedLinears()
    if device.type == "cuda":
        chosen["post_grad_custom_pre_pass"] = Float32WeightGradients()
    return chosen


class _Pass(CustomGraphPass):
    """A pass over graphs. Two of a kind are equal: to the compiler, other options mean other graphs."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def uuid(self) -> Any:
        """Of this file's content: the compiler's cache keeps graphs that went through the pass."""
        return get_hash_for_files((__file__,), type(self).__name__)


class JoinedLinears(_Pass):
    """Makes one product of linear layers with the same input, such as queries, keys and values, or an MLP's two halves.

    One large product fills a GPU better than three small ones, and the input's gradient comes out of one product
    instead of being added up from three. Weights stay the layers' own: they are joined as they are cast, and left alone
    where no cast is needed, for then joining would copy them.
    """

    def __call__(self, graph: Graph) -> None:
        layers: dict[Any, list[Any]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch._C._nn.linear and not node.kwargs:
                source, _, bias = (*node.args, None)[:3]
                layers.setdefault((source, bias is None), []).append(node)
        for (_, without_bias), nodes in layers.items():
            if len(nodes) > 1 and all(_is_cast(node.args[1]) for node in nodes):
                self._join(graph, nodes, without_bias)

    @staticmethod
    def _join(graph: Graph, nodes: list[Any], without_bias: bool) -> None:
        dtype = _compute_dtype(_value(nodes[0].args[1]))
        with graph.inserting_before(nodes[0]):

            def joined(argument: int) -> Node:
                # Cast before they are joined: the compiler then writes each straight into its place.
                parts = [graph.call_method("to", (node.args[argument], dtype)) for node in nodes]
                return graph.call_function(torch.cat, (parts,))

            bias = None if without_bias else joined(2)
            product = graph.call_function(torch._C._nn.linear, (nodes[0].args[0], joined(1), bias))
            widths = [len(_value(node.args[1])) for node in nodes]
            parts = graph.call_function(torch.split, (product, widths, -1))
            for place, node in enumerate(nodes):
                node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, place)))
        for node in nodes:
            graph.erase_node(node)


class Float32WeightGradients(_Pass):
    """Lets a product of bfloat16 factors write a float32 weight's gradient as it was added up, in float32.

    Under autocast a linear layer rounds that gradient to bfloat16 and then casts it: digits lost, and one more pass
    over memory. Only backward passes hold what is replaced, so the bits of log-probs stay.
    """

    def __call__(self, graph: Graph) -> None:
        for product in list(graph.nodes):
            casts = self._casts(product) if self._is_gradient(product) else None
            if not casts:
                continue
            with graph.inserting_before(product):
                exact = graph.call_function(aten.mm.dtype, (*product.args, torch.float32))
            exact.meta = {**product.meta, "val": product.meta["val"].to(torch.float32)}
            product.replace_all_uses_with(exact)
            graph.erase_node(product)
            for cast in casts:
                part = cast.args[0]
                part.meta = dict(cast.meta)
                cast.replace_all_uses_with(part)
                graph.erase_node(cast)

    @staticmethod
    def _is_gradient(node: Any) -> bool:
        """Whether a node is grad_outᵀ · input in bfloat16."""
        return (
            node.op == "call_function"
            and node.target is aten.mm.default
            and node.args[0].target is aten.permute.default
            and node.args[0].meta["val"].dtype == torch.bfloat16
        )

    @staticmethod
    def _casts(product: Any) -> list[Any] | None:
        """The casts to float32 of a product or of its slices, one a joined weight; None if it has any other use."""
        casts = []
        for user in product.users:
            ends = list(user.users) if user.target is aten.slice.Tensor else [user]
            for end in ends:
                if end.target is not prims.convert_element_type.default or end.args[1] != torch.float32:
                    return None
                if not all(further.op == "output" for further in end.users):
                    return None
                casts.append(end)
        return casts


def _is_cast(weight: Any) -> bool:
    """Whether a weight comes into the graph as it is, in another dtype than a linear layer computes in."""
    return weight.op in ("placeholder", "get_attr") and _value(weight).dtype != _compute_dtype(_value(weight))


def _value(node: Any) -> Tensor:
    return node.meta["example_value"]


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in: that of autocast where the graph is under it, else its weight's."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
