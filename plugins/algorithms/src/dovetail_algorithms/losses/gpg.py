"""GPG: the plain policy gradient on group advantages (arXiv 2504.02546)."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail_algorithms.config.losses import GpgConfig


class Gpg(PolicyLoss):
    """L = −A · log π.

    Paper: Group Policy Gradient, arXiv 2504.02546, which leaves surrogate, clip and reference out, and corrects the
    advantages instead (`algorithm.advantage: gpg`). There is no ratio to an older policy, hence no metric of one:
    take one mini-batch a rollout, since nothing corrects for a policy that has moved on.

    Aggregation: `token_mean`, as in the paper. Nothing to set.
    """

    name = "gpg"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = GpgConfig

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T]; no metrics."""
        return TokenLosses(losses_T=-inputs.columns["advantages"] * inputs.log_probs_T)
