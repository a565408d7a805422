"""REINFORCE: the plain policy gradient (Williams, 1992)."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces.policy_loss import LossInputs, PolicyLoss, TokenLosses
from dovetail_algorithms.config.losses import ReinforceConfig


class Reinforce(PolicyLoss):
    """L = −A · log π. Right on-policy only: there is no ratio to an older policy, and no metric of one."""

    name = "reinforce"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ReinforceConfig

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(losses_T=-inputs.columns["advantages"] * inputs.log_probs_T)
