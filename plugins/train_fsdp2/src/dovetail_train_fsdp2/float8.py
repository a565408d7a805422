"""Matrix products of the decoder layers in float8 by torchao, each row scaled by its own maximum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from dovetail.errors import ConfigError, PluginNeedsError

MULTIPLE = 16
"""The numbers of input and output features of a float8 layer must be multiples of this."""
_CAPABILITY = (8, 9)
"""Compute capability of the first CUDA devices that multiply float8 matrices."""


def multiply_in_float8(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Replace linear layers by layers that multiply in float8; weights, gradients and results keep their dtypes.

    On a CPU, numbers are rounded in the same way and multiplied in float32. Layers whose numbers of features are not multiples of 16 are
    not replaced.

    Args:
        layers: the layers of the decoder.
        device: the device of the layers.

    Raises:
        PluginNeedsError: torchao is not installed.
        ConfigError: the device does not support float8 products.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PluginNeedsError(
            f"float8=rowwise needs the package torchao, which can't be imported here: {error}",
            hint="pip install 'dovetail-train-fsdp2[float8]'",
        ) from error
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ConfigError(
            f"float8=rowwise needs a CUDA device of capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or newer; this device is "
            f"{torch.cuda.get_device_name(device)}",
            hint="leave float8 out",
        )
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        # The weight's gradient is a product over tokens, whose number need not be a multiple of `MULTIPLE`.
        pad_inner_dim=True,
        emulate=device.type == "cpu",
    )
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % MULTIPLE or module.out_features % MULTIPLE
    )
