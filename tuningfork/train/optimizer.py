"""AdamW on float32 weights, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from tuningfork.train.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019). Weight decay applies to matrices; norms and biases stay free of it."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def optimizer_bytes(model: nn.Module) -> int:
    """Memory that the optimizer will hold: AdamW keeps two numbers a weight, in the weight's precision."""
    return sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0).

    Warm-up rises in equal parts and reaches the peak with its last step, so no step is spent at 0. Then linear falls
    in equal parts and cosine on half a period, both to 0 just after the last step.
    """
    warmup = math.ceil(round(config.warmup_ratio * total_steps, 6))  # 0.07 x 100 is 7, not 7.000000000000001
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - warmup) / (total_steps - warmup)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * left
