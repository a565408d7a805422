"""REINFORCE: the plain policy gradient (Williams, 1992)."""

from __future__ import annotations

from dovetail.interfaces import LossInputs, PluginConfig, PolicyLoss, TokenLosses


class ReinforceLoss(PolicyLoss):
    """The plain policy gradient, L = −A · log π.

    Williams, 1992 (doi 10.1007/BF00992696). There is no ratio to an older policy, and no ratio metric, so by itself this loss is right
    only on-policy. Off-policy, a rollout correction computes the importance weight w, and the objective multiplies this loss by w (L = −w
    · A · log π); the presets `bypass_pg_*` do so.

    Aggregation: any. The loss has no settings.
    """

    name = "reinforce"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return losses [T]; no metrics."""
        return TokenLosses(losses_T=-inputs.columns["advantages"] * inputs.log_probs_T)
