"""Settings of the model room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

ACTIVATION_MEMORY = r"^(none|block|offload|auto|budget:(0?\.[0-9]+|0\.?|1(\.0*)?))$"
ACTIVATION_MEMORY_FORMS = "none, block, budget:<0..1> such as budget:0.5, offload, or auto"
"""What train.activation_memory may be, as a pattern and in words; models/activations.py says what each means."""


@dataclass
class ModelConfig:
    """Which model is trained, and in which precision it computes."""

    path: str = ""
    """A Hugging Face model folder: config.json, safetensors weights, tokenizer. Or a model of the hub, owner/name or
    owner/name@revision, which is fetched into its cache: a folder of that name here wins, unless hub: stands in front.
    config.yaml has the commit."""
    init: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = None
    """A model from nothing, in the place of path: a config.json, or its settings, model_type among them, of any family
    that is trained. Its weights are drawn from init_seed by the family's own rules, on the CPU in float32, so they are
    the same whatever the run computes with. output.dir/start has it as a model folder."""
    init_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial values of a model from nothing."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Tokenizer of a model from nothing: bytes, one token for each byte of UTF-8; or a folder with a tokenizer.json.
    Where init does not say vocab_size and the ids of bos, eos and pad, they follow from it."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute precision. auto: bfloat16 on a GPU or with bfloat16 weights, else float32. float16 is for GPUs without
    bfloat16: gradients are multiplied by a loss scale of 65,536 at first, doubled behind 2,000 steps without a skipped
    one; a step whose gradient is not finite is skipped, and halves it."""
    tf32: bool = False
    """With dtype: float32 on a GPU: PyTorch's products of float32 matrices, those of layers and head, round their
    factors to TF32, which keeps 10 of 23 bits. Kernels of ours and the checks of a start keep float32, so compiled
    blocks are compiled anew behind these. With an objective that has a reference, products take twice as long, for
    cuBLAS gets no workspace: of layers with 512 inputs and more, a row then has the same bits in every pack."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Precision in which matrices are kept and updated; norms and biases are always float32. With bfloat16, weights,
    gradients and moments take 6 bytes a weight instead of 16. It needs train.optimizer adamw_8bit, which does not round
    small updates away."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile, one decoder block at a time. auto: on for a GPU."""
