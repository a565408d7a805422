"""PPO's clipped loss (arXiv 1707.06347), with asymmetric bounds (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import LossInputs, PolicyLoss, TokenLosses
from dovetail.numerics import share_metric
from dovetail_algorithms.config.losses import PpoClipConfig
from dovetail_algorithms.losses.ratio import (
    RATIO_BOUND,
    as_numbers,
    clip_metrics,
    clipped_surrogate,
    log_ratio,
    ratio_metrics,
    with_slopes,
)


class PpoClip(PolicyLoss):
    """L = max(−A ρ, −A · clip(ρ, 1 − clip_low, 1 + clip_high)), ρ = exp(clamp(log π − log π_old, ±20)).

    Papers: PPO, arXiv 1707.06347 (clip_low = clip_high = 0.2); Clip-Higher of DAPO, 2503.14476 (0.2 and 0.28), which
    leaves rare tokens more room to grow; dual clip, 1912.09729: where A < 0, L is capped at −A · dual_clip, which
    bounds it where ρ has grown large. Dual clip is on by default (3.0), although the papers of PPO, GRPO and DAPO have
    none: `dual_clip: null` is their loss to the letter.

    The default choice, on-policy or a few updates away from it. Aggregation: PPO takes `token_mean`, as DAPO does;
    GRPO `seq_mean_token_mean`; Dr. GRPO `seq_mean_token_sum_norm`.
    """

    name = "ppo_clip"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = PpoClipConfig

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses [T], and metrics: shares of tokens where a bound took the gradient away, and the ratio's."""
        log_probs_T, advantages_T = inputs.log_probs_T, inputs.columns["advantages"]
        log_ratio_T = log_ratio(log_probs_T, inputs.columns["old_log_probs"])
        ratio_T = log_ratio_T.exp()
        low, high, dual = self.config.clip_low, self.config.clip_high, self.config.dual_clip
        found = clipped_surrogate(
            ratio_T, advantages_T, clip_low=low, clip_high=high, cap=dual or RATIO_BOUND
        )

        tokens, weights_T = inputs.mask_T.count_nonzero(), as_numbers(inputs.mask_T, ratio_T)
        metrics = clip_metrics(tokens, found.upper_T, found.lower_T)
        metrics |= ratio_metrics(ratio_T, log_ratio_T, weights_T, tokens)
        if dual is not None:
            metrics["actor/dual_clip_frac"] = share_metric(found.capped_T, tokens)
        return TokenLosses(
            losses_T=with_slopes(found.values_T, found.slopes_T, log_probs_T), metrics=metrics
        )
