"""Models on a GPU, and the two ways through them that tests hold against each other."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import transformers

from tests.tiny import one_pack, score_alone, scorer_of, tiny_model
from tuningfork.models.hf import attention
from tuningfork.models.hf.load import hold_weights
from tuningfork.models.policy import Policy
from tuningfork.train.checks.rounding import rounded_products

CUDA = torch.device("cuda")


def policy_of(family: str, dtype: torch.dtype, compiled: bool = True, weights: torch.dtype = torch.float32) -> Policy:
    torch._dynamo.reset()
    # The tiny models' matrices are below what is ever held in bfloat16.
    model = tiny_model(family, torch.float32).to(CUDA) if weights == torch.float32 else memory_model()
    hold_weights(model, weights)
    policy = Policy.fast(model, dtype)
    if compiled:
        policy.compile()
    return policy


def memory_model():
    """Blocks that weigh more than the head and the embeddings: 8 of them."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    ).to(CUDA)


def packed(policy, examples, weights, share):
    batch = one_pack(examples, share).to(CUDA)
    policy.model.zero_grad()
    _, logps = scorer_of(policy, 64).backward(batch, lambda a, b, logps: (weights[a:b] * logps).sum())
    return logps, {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def alone(policy, examples, weights, autocast):
    """By plain transformers, in bfloat16 with autocast; a class's own scan would compute in float32 even so. Its loop
    over the rows of a chunk would be minutes of work for the compiler, who has the model's blocks."""
    policy.model.zero_grad()
    with (
        torch.compiler.set_stance("force_eager"),
        rounded_products(torch.bfloat16) if autocast else nullcontext(),
    ):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            sums = torch.stack([s for example in examples for s in score_alone(policy.model, example)])
        (weights * sums).sum().backward()
    return sums.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters()}
