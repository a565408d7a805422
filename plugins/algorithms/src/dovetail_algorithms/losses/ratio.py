"""The probability ratio of the policy to an older one, and the metrics that every loss with a ratio reports. T tokens."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dovetail.numerics import max_metric, mean_metric
from dovetail.telemetry.metrics import Metric

LOG_RATIO_BOUND = 20.0
"""The log-ratio is kept within ± this, so that exp does not overflow."""


def log_ratio(
    log_probs_T: Float[Tensor, "T"], old_log_probs_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """The log-ratio, float [T]: clamp(log_probs − old_log_probs, ±20)."""
    return (log_probs_T - old_log_probs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio_metrics(
    log_ratio_T: Float[Tensor, "T"],
    ratio_T: Float[Tensor, "T"],
    mask_T: Bool[Tensor, "T"],
    tokens: Int64[Tensor, ""],
) -> dict[str, Metric]:
    """Mean and maximum of ρ, and the KL to the old policy by ρ − 1 − log ρ (k3).

    Args:
        log_ratio_T: float [T].
        ratio_T: float [T], its exponential.
        mask_T: bool [T].
        tokens: int [], how many tokens have mask 1.
    """
    return {
        "actor/ratio_mean": mean_metric(ratio_T, mask_T, tokens),
        "actor/ratio_max": max_metric(ratio_T, mask_T),
        "actor/approx_kl": mean_metric(ratio_T.detach() - 1 - log_ratio_T.detach(), mask_T, tokens),
    }
