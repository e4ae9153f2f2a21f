"""What we ask of torch.compile: the same bits from every graph, and weight gradients that stay in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten


def options(device: torch.device) -> dict[str, Any]:
    """Options of torch.compile for decoder blocks on a device.

    A reduction must add in the same order in every graph, or the margin at step 0 is not 0. By default the compiler
    times several orders on the device and keeps the fastest, anew for every graph.
    """
    known = torch._inductor.config
    chosen: dict[str, Any] = {name: True for name in ("deterministic", "batch_invariant") if hasattr(known, name)}
    if device.type == "cuda":
        chosen["post_grad_custom_pre_pass"] = Float32WeightGradients()
    return chosen


class Float32WeightGradients(CustomGraphPass):
    """Lets a product of bfloat16 factors write a float32 weight's gradient as it was added up, in float32.

    Under autocast a linear layer rounds that gradient to bfloat16 and then casts it: digits lost, and one more pass
    over memory. Only backward passes hold what is replaced, so the bits of log-probs stay.
    """

    def __call__(self, graph: Graph) -> None:
        for cast in list(graph.nodes):
            if not self._is_gradient(cast):
                continue
            product: Node = cast.args[0]
            with graph.inserting_before(product):
                exact = graph.call_function(aten.mm.dtype, (*product.args, torch.float32))
            exact.meta = dict(cast.meta)
            cast.replace_all_uses_with(exact)
            graph.erase_node(cast)
            graph.erase_node(product)

    @staticmethod
    def _is_gradient(node: Node) -> bool:
        """Whether a node casts grad_outᵀ · input, of which there is no other use, and hands the result out."""
        if node.op != "call_function" or node.target is not torch.ops.prims.convert_element_type.default:
            return False
        product, dtype = node.args
        if dtype != torch.float32 or not isinstance(product, Node) or product.target is not aten.mm.default:
            return False
        factor = product.args[0]
        return (
            len(product.users) == 1
            and all(user.op == "output" for user in node.users)
            and isinstance(factor, Node)
            and factor.target is aten.permute.default
            and factor.meta["val"].dtype == torch.bfloat16
        )

    def uuid(self) -> Any:
        """Of this file's content: the compiler's cache keeps graphs that went through the pass."""
        return get_hash_for_files((__file__,))
