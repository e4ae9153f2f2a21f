"""What we ask of torch.compile: the same bits from every graph, and weight gradients that stay in float32."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config  # private: torch._inductor.config

# private: torch._inductor.custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

aten = torch.ops.aten


def options(device: torch.device) -> dict[str, Any]:
    """Options of torch.compile for decoder blocks on a device.

    A reduction must add in the same order in every graph, or the margin at step 0 is not 0. By default the compiler
    times several orders on the device and keeps the fastest, anew for every graph.
    """
    known = torch._inductor.config  # private: torch._inductor.config
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
            product = cast.args[0]
            with graph.inserting_before(product):
                exact = graph.call_function(aten.mm.dtype, (*product.args, torch.float32))
            exact.meta = dict(cast.meta)
            cast.replace_all_uses_with(exact)
            graph.erase_node(cast)
            graph.erase_node(product)

    @staticmethod
    def _is_gradient(node: Any) -> bool:
        """Whether a node casts grad_outᵀ · input to float32 and hands it out, and nothing else uses the product."""
        # private: torch.ops.prims.convert_element_type
        if node.op != "call_function" or node.target is not torch.ops.prims.convert_element_type.default:
            return False
        product, dtype = node.args
        return (
            dtype == torch.float32
            and product.target is aten.mm.default
            and len(product.users) == 1
            and all(user.op == "output" for user in node.users)
            and product.args[0].target is aten.permute.default
            and product.args[0].meta["val"].dtype == torch.bfloat16
        )

    def uuid(self) -> Any:
        """A hash of this file's content: the compiler's cache keeps graphs that went through the pass."""
        return get_hash_for_files((__file__,))

    def __eq__(self, other: object) -> bool:  # to the compiler, unequal options mean other graphs: one for every block
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))
