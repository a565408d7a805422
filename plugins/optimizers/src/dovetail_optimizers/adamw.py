"""The optimizer `adamw`: torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.interfaces import Optimizer, PluginConfig
from dovetail_optimizers.config import AdamWConfig


class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101): w ← w − lr · (m̂ / (√v̂ + eps) + weight_decay · w).

    g is the gradient of a weight w. Its moments are m ← β₁m + (1 − β₁)g and v ← β₂v + (1 − β₂)g²; m̂ and v̂ are the bias-corrected moments.
    """

    name = "adamw"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic", "sharded"})
    Config = AdamWConfig

    @classmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        return 8

    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        return [adamw(self.config, parameters.values())]


def adamw(
    config: PluginConfig, parameters: Collection[Tensor], lr: float | None = None
) -> torch.optim.AdamW:
    """Make torch's AdamW from a config, for parameters of any shape; `lr` overrides the config's."""
    return torch.optim.AdamW(
        list(parameters),
        lr=config.lr if lr is None else lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
