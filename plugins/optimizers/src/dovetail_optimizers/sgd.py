"""The optimizer `sgd`: torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.interfaces import Optimizer, PluginConfig
from dovetail_optimizers.config import SgdConfig


class Sgd(Optimizer):
    """Gradient descent: w ← w − lr · b, with the running sum of gradients b ← momentum · b + g + weight_decay · w.

    w are weights and g is their gradient. Weight decay is added after the engine clips g.
    """

    name = "sgd"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic", "sharded"})
    Config = SgdConfig

    @classmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        return 4 if config.momentum else 0

    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(
                list(parameters.values()),
                lr=self.config.lr,
                momentum=self.config.momentum,
                nesterov=self.config.nesterov,
                weight_decay=self.config.weight_decay,
            )
        ]
