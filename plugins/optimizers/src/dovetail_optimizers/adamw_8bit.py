"""The optimizer `adamw_8bit`: torchao.optim.AdamW8bit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dovetail.errors import PluginNeedsError
from dovetail.interfaces import Optimizer, PluginConfig
from dovetail_optimizers.adamw import adamw
from dovetail_optimizers.config import AdamW8bitConfig


class AdamW8bit(Optimizer):
    """AdamW with moments quantised to 8 bits, one scale for each block of 256 values."""

    name = "adamw_8bit"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic", "sharded"})
    Config = AdamW8bitConfig

    @classmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        return 2 + 2 * 4 / 256

    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        if find_spec("torchao") is None:
            raise PluginNeedsError(
                "the optimizer adamw_8bit needs the package torchao, which is not installed",
                hint="pip install 'dovetail-optimizers[torchao]', or use optim.name=adamw",
            )
        from torchao.optim import AdamW8bit as TorchaoAdamW8bit

        config = self.config
        even = [p for p in parameters.values() if _divides_evenly(p)]
        # If shards have different sizes, torchao quantises only some of them, and a checkpoint can't hold a parameter in two forms.
        uneven = [p for p in parameters.values() if not _divides_evenly(p)]
        made: list[torch.optim.Optimizer] = []
        if even:
            made.append(
                TorchaoAdamW8bit(
                    even,
                    lr=config.lr,
                    betas=config.betas,
                    eps=config.eps,
                    weight_decay=config.weight_decay,
                )
            )
        if uneven:
            made.append(adamw(config, uneven))
        return made

    def state_tensors(self, value: Tensor) -> Mapping[str, Tensor]:
        quantised: Any = value
        if not hasattr(quantised, "codes"):
            return {"": value}
        return {"codes": quantised.codes, "scale": quantised.scale}


def _divides_evenly(parameter: Tensor) -> bool:
    """Return whether every rank holds the same number of rows of a parameter [rows, …]."""
    if not isinstance(parameter, DTensor):
        return True
    sharded = [
        size
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        if placement.is_shard()
    ]
    return all(parameter.shape[0] % size == 0 for size in sharded)
