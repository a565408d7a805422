"""The optimizer `adafactor`: torch.optim.Adafactor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.interfaces import Optimizer, PluginConfig
from dovetail_optimizers.config import AdafactorConfig


class Adafactor(Optimizer):
    """Adafactor (arXiv 1804.04235): w ← w − lr_t · max(min_scale, RMS(w)) · u / max(1, RMS(u) / clip).

    w are a parameter's weights, g their gradient and t the step; u = g / √v̂ and lr_t = min(lr, 1 / √t). v̂ is the running average of g².
    For a matrix, v̂ is the product of the row and column averages of g², divided by their mean.

    Lacks the capability `sharded`: torch's Adafactor (as of 2.13) fails on DTensors, since it raises a partial norm to a power in place.
    """

    name = "adafactor"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = AdafactorConfig

    @classmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        # A matrix has one number for each row and column, which is negligible, and few parameters are vectors.
        return 0

    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        return [
            torch.optim.Adafactor(
                list(parameters.values()),
                lr=self.config.lr,
                beta2_decay=self.config.beta2_decay,
                eps=(None, self.config.min_scale),
                d=self.config.clip,
                weight_decay=self.config.weight_decay,
            )
        ]
