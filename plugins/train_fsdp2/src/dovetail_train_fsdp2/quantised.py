"""Linear layers in 4-bit NormalFloat below an adapter (QLoRA, arXiv 2305.14314), by torchao's NF4Tensor.

Each block of 64 weights has a scale of 8 bits, and each block of 256 scales has a scale of its own: 4.13 bits a weight. A pass
dequantises each layer's weights to the compute dtype and then frees the result. The 4-bit weights are frozen and not sharded: every
rank holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError, PluginNeedsError

BLOCK, SCALES = 64, 256
"""The number of weights that share a scale, and the number of scales that share a scale of their own."""


class Nf4Linear(nn.Module):
    """Linear layer x Wᵀ + b with W [out, in] in 4 bits in the buffer `weight`, which is None until `fill`."""

    weight: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Create the replacement of a frozen linear layer, without its weight."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("weight", None)

    def fill(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """Quantise a weight [out, in] of any dtype on `device`, and store it; forward and backward passes dequantise it to `dtype`."""
        self.weight = quantised(weight.to(device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, […, out], for x […, in], in the dtype of x."""
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        y = cast("Tensor", linear_nf4(x, self.weight))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def quantised(weight: Tensor) -> Tensor:
    """Return a weight [out, in] in 4 bits: an NF4Tensor of its shape and dtype, on its device.

    Raises:
        PluginNeedsError: torchao is not installed.
        ConfigError: the weight's size is not a multiple of the block size.
    """
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError as error:
        raise PluginNeedsError(
            f"lora.base=nf4 needs the package torchao, which can't be imported here: {error}",
            hint="pip install 'dovetail-train-fsdp2[nf4]'",
        ) from error
    blocks, rest = divmod(weight.numel(), BLOCK)
    if rest or not blocks:
        raise ConfigError(
            f"lora.base=nf4 can't quantise a weight of shape {tuple(weight.shape)}: its number of elements must be a multiple of {BLOCK}",
            hint="leave lora.base out",
        )
    scales = SCALES
    while blocks % scales:
        scales //= 2
    return cast("Tensor", to_nf4(weight.contiguous(), BLOCK, scales))


def dequantised(tensor: Tensor) -> Tensor:
    """Return a quantised weight [out, in] dequantised, in its original dtype; any other tensor unchanged."""
    original = getattr(tensor, "get_original_weight", None)
    return tensor if original is None else cast("Tensor", original())


def quantisable(model: nn.Module, head: nn.Module | None) -> Iterator[tuple[str, nn.Linear]]:
    """Yield name and module of each frozen linear layer of a model with an adapter, except the output layer.

    Args:
        model: the model with its adapter.
        head: the output layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad:
            yield name, module


def make_room(model: nn.Module, head: nn.Module | None) -> dict[str, Nf4Linear]:
    """Replace the frozen linear layers by 4-bit layers without weights, and return the new layers by module name."""
    made = {name: Nf4Linear(module) for name, module in quantisable(model, head)}
    for name, layer in made.items():
        parent, _, own = name.rpartition(".")
        setattr(cast("Any", model.get_submodule(parent)), own, layer)
    return made
