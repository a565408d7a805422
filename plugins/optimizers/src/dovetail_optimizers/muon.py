"""Muon: torch.optim.Muon for hidden matrices, and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.interfaces import Optimizer, PluginConfig
from dovetail_optimizers.adamw import adamw
from dovetail_optimizers.config import MuonConfig


class Muon(Optimizer):
    """Muon (arXiv 2502.16982) for the matrices of hidden layers: w ← w − lr · (scale · NS(b) + weight_decay · w).

    w is a weight matrix and g its gradient; b ← μb + (1 − μ)g is the average of gradients, with μ = `momentum`. NS makes b nearly
    orthogonal by Newton–Schulz iterations in bfloat16. Matrices that are divided over ranks are gathered for the iterations. AdamW
    updates all other parameters, also experts that are stacked in one three-dimensional parameter.
    """

    name = "muon"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic", "sharded"})
    Config = MuonConfig

    @classmethod
    def state_bytes(cls, config: PluginConfig, *, matrix: bool) -> float:
        return 4 if matrix else 8

    def build(
        self, parameters: Mapping[str, Tensor], matrices: Collection[str]
    ) -> Sequence[torch.optim.Optimizer]:
        config = self.config
        chosen = [p for name, p in parameters.items() if name in matrices and p.dim() == 2]
        rest = [p for name, p in parameters.items() if name not in matrices or p.dim() != 2]
        made: list[torch.optim.Optimizer] = []
        if chosen:
            made.append(
                torch.optim.Muon(
                    chosen,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    nesterov=config.nesterov,
                    ns_steps=config.newton_schulz_steps,
                    adjust_lr_fn=config.scale,
                )
            )
        if rest:
            made.append(adamw(config, rest, lr=config.adamw_lr))
        return made
