"""Decoder blocks whose matrix products run in float8, by torchao."""

from __future__ import annotations

import torch
from torch import nn

from tuningfork.errors import ConfigError

RECIPE = "rowwise"  # a scale a row; one scale for a whole tensor would let an example's neighbours change its rounding
_MULTIPLE = 16  # what the matrix units take


def check(device: torch.device) -> None:
    """Raises ConfigError where there is no GPU that can, or no torchao."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError("model.float8 is true, but this machine has no GPU with float8 (H100 or newer). Remove it.")
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"model.float8 is true, which needs torchao ({error}). Install it: pip install torchao"
        ) from error


def use_float8(blocks: nn.ModuleList, device: torch.device) -> int:
    """Let the linear layers of decoder blocks multiply in float8, forward and backward; weights stay as they are.

    Returns:
        The number of layers.

    Raises:
        ConfigError: as `check`, or no layer has sizes that are multiples of 16.
    """
    check(device)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)

    convert_to_float8_training(blocks, config=Float8LinearConfig.from_recipe_name(RECIPE), module_filter_fn=fits)
    count = sum(isinstance(module, Float8Linear) for module in blocks.modules())
    if not count:
        raise ConfigError(
            "model.float8 is true, but no linear layer of the model's blocks has sizes that are multiples of "
            f"{_MULTIPLE}. Remove it."
        )
    return count
