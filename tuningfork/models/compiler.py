"""What we ask of torch.compile: the same bits from every graph, and weight gradients that stay in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config  # private: torch._inductor.config

# private: torch._inductor.custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

aten = torch.ops.aten


def options(device: torch.device, wide_gradients: bool = True) -> dict[str, Any]:
    """Options of torch.compile for decoder blocks on a device.

    Args:
        wide_gradients: gradients of all matrices are float32, whatever the dtype that a block gets them in.

    A reduction must add in the same order in every graph, or the margin at step 0 is not 0. By default the compiler
    times several orders on the device and keeps the fastest, anew for every graph.
    """
    known = torch._inductor.config  # private: torch._inductor.config
    chosen: dict[str, Any] = {name: True for name in ("deterministic", "batch_invariant") if hasattr(known, name)}
    if device.type == "cuda":
        chosen["post_grad_custom_pre_pass"] = Float32WeightGradients(wide_gradients)
        # A norm's two sums in one kernel for every number of rows. By default only for many, and a graph for each case.
        chosen["triton.mix_order_reduction_non_strict_mode"] = True
    return chosen


class Float32WeightGradients(CustomGraphPass):
    """Lets a product of bfloat16 factors write a weight's float32 gradient as it was added up, in float32.

    Under autocast a linear layer rounds that gradient to bfloat16 and then casts it: digits lost, and one more pass
    over memory. Where a block gets the weight in bfloat16 already, autograd would cast behind the block. Only backward
    passes hold what is replaced, so the bits of log-probs stay.

    Args:
        wide: gradients of weights that a block gets in bfloat16 are float32, too.
    """

    def __init__(self, wide: bool = True) -> None:
        self.wide = wide

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            product = self._gradient(node)
            if product is None:
                continue
            with graph.inserting_before(product):
                exact = graph.call_function(aten.mm.dtype, (*product.args, torch.float32))
            exact.meta = dict(node.meta, val=node.meta["val"].to(torch.float32))
            node.replace_all_uses_with(exact)
            graph.erase_node(node)
            if product is not node:
                graph.erase_node(product)

    def _gradient(self, node: Any) -> Any:
        """The product grad_outᵀ · input that a node is, or casts to float32, and hands out; None where it is no such
        node, or something else uses the product."""
        if node.op != "call_function" or any(user.op != "output" for user in node.users):
            return None
        product = node
        # private: torch.ops.prims.convert_element_type
        if node.target is torch.ops.prims.convert_element_type.default and node.args[1] == torch.float32:
            product = node.args[0]
        elif not self.wide:
            return None
        found = (
            product.target is aten.mm.default
            and len(product.users) == 1
            and product.args[0].target is aten.permute.default
            and product.args[0].meta["val"].dtype == torch.bfloat16
        )
        return product if found else None

    def uuid(self) -> Any:
        """A hash of this file's content and of what is replaced: the compiler's cache keeps graphs that went through
        the pass."""
        return get_hash_for_files((__file__,), extra=str(self.wide))

    def __eq__(self, other: object) -> bool:  # to the compiler, unequal options mean other graphs: one for every block
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.wide))
