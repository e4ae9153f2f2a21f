"""The optimizers, the size of a gradient, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tuningfork.distributed.sums import squared_norm
from tuningfork.errors import ConfigError
from tuningfork.models.hf.load import bears_8_bits
from tuningfork.models.policy import Spread
from tuningfork.train.average import keep_average
from tuningfork.train.config import TrainConfig
from tuningfork.train.own_shards import own_shards


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019). Weight decay applies to matrices; norms and biases stay free of it.

    `adamw_8bit` is torchao's: both moments in 8 bits, a scale for each block of 256 (Dettmers et al. 2022,
    arXiv:2110.02861), computed in float32; what it writes into bfloat16 weights is rounded up or down by chance, so
    that an update smaller than their spacing is kept on average. With `ema_decay` it keeps an average of the weights,
    too.

    Raises:
        ConfigError: adamw_8bit is asked for and cannot be had, see `check_optimizer`.
    """
    check_optimizer(config)
    groups: list[dict[str, Any]] = []
    for decay, of_kind in ((config.weight_decay, lambda p: p.ndim >= 2), (0.0, lambda p: p.ndim < 2)):
        # A fused step takes weights that lie alike: whole, or over one mesh of processes.
        alike: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for weight in model.parameters():
            if weight.requires_grad and of_kind(weight):
                alike.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
        groups += [{"params": weights, "weight_decay": decay} for weights in alike.values()]
    optimizer = _adamw(groups, config)
    if config.ema_decay is not None:
        keep_average(optimizer, config.ema_decay)
    return optimizer


def _adamw(groups: list[dict[str, Any]], config: TrainConfig) -> Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=True)
    from torchao.optim import AdamW8bit

    class FineMoments(AdamW8bit):
        """Moments that do not divide into blocks are float32: in bfloat16, as their shard of a weight may be, they
        would be too coarse."""

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:  # private: torchao.optim.AdamW8bit
            if bears_8_bits(p.shape):
                return super()._new_buffer(p, signed)  # type: ignore[no-any-return]
            return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))

    return FineMoments(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, bf16_stochastic_round=True)


def hold_gradients(model: nn.Module, config: TrainConfig) -> None:
    """Let gradients be added up in what `train.gradient_dtype` says. To be called before there are any."""
    if config.gradient_dtype == "float32":
        for weight in model.parameters():
            if weight.requires_grad:
                weight.grad_dtype = torch.promote_types(weight.dtype, torch.float32)


def gradient_norm(optimizer: Optimizer, spread: Spread | None = None) -> Tensor:
    """The 2-norm of all gradients together, a scalar on their device: added up in float64, rounded to float32 where no
    gradient is wider.

    `spread`: how they lie on the processes, where they are spread over some. The last bits depend on that.
    """
    gradients = _gradients(optimizer)
    squares = squared_norm(gradients, gradients[0].device) if spread is None else spread.squared_norm(gradients)
    return squares.sqrt().to(torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32)


def move_weights(optimizer: Optimizer, scale: Tensor | None = None) -> None:
    """Move the weights once, by gradients times `scale` (a scalar on their device; a fused optimizer rounds it to
    float32). Gradients are used up. Weights that are spread over processes are moved by each as far as it has them."""
    with own_shards(optimizer):
        _move(optimizer, scale)


def _move(optimizer: Optimizer, scale: Tensor | None) -> None:
    if scale is None:
        optimizer.step()
    elif optimizer.defaults.get("fused"):
        # A fused optimizer divides by this while it reads a gradient, so scaling takes no pass over memory of its own.
        # private: torch.optim.AdamW.grad_scale
        optimizer.grad_scale = scale.reciprocal().float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(_gradients(optimizer), scale)  # private: torch._foreach_mul_
        optimizer.step()


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """The rate of the next steps, for all weights."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a compiled step takes a new value, but not a new object
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_optimizer(config: TrainConfig) -> None:
    """Raises ConfigError where the optimizer cannot be had: adamw_8bit without torchao, or, since torchao compiles its
    step, on a CPU without a compiler for C++."""
    if config.optimizer != "adamw_8bit":
        return
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer is adamw_8bit, which needs torchao ({error}). Install it: pip install torchao"
        ) from error
    if not torch.cuda.is_available() or config.device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # private: torch._inductor.cpp_builder
        from torch._inductor.exc import InvalidCxxCompiler  # private: torch._inductor.exc

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "train.optimizer is adamw_8bit, whose step is compiled, but no compiler for C++ is found on this "
                "machine. Install g++, or set train.optimizer: adamw."
            ) from error


def optimizer_bytes(model: nn.Module, config: TrainConfig) -> int:
    """Memory that the optimizer will hold: two moments a weight, in the weight's precision or in 8 bits with a float32
    scale for each block of 256; and an average of the weight, where one is kept."""

    def of_a_moment(weight: Tensor) -> int:
        count = weight.numel()
        if config.optimizer == "adamw_8bit" and bears_8_bits(weight.shape):
            return count + 4 * count // 256
        return count * weight.element_size()

    averages = config.ema_decay is not None
    moved = [weight for weight in model.parameters() if weight.requires_grad]
    return sum(2 * of_a_moment(weight) + averages * weight.numel() * weight.element_size() for weight in moved)


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) of `total_steps`.

    Warm-up rises in equal parts and reaches the peak with its last step, so no step is spent at 0. Then linear falls
    in equal parts and cosine on half a period, both to the floor just after the last step: with d the share of the fall
    that is done, peak · (floor + (1 - floor) · left), where left is 1 - d, or (1 + cos(pi · d)) / 2. wsd (warm-up,
    stable, decay; Hu et al. 2024, arXiv:2404.06395) holds the peak up to `decay_start` of all steps, and falls from
    there as cosine does.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = _steps(config.warmup_ratio, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    begin = max(warmup, _steps(config.decay_start, total_steps)) if config.schedule == "wsd" else warmup
    if config.schedule == "constant" or step < begin:
        return config.learning_rate
    done = (step - begin) / (total_steps - begin)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def _steps(share: float, total: int) -> int:
    """A share of all steps, of which a part of one is a whole one; 0.07 x 100 is 7, not 7.000000000000001."""
    return math.ceil(round(share * total, 6))


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
