"""Estimators of the KL divergence to a reference policy at each token (joschu.net/blog/kl-approx.html).

With samples x ~ π and d = log π(x) − log π_ref(x), each estimator has KL(π ‖ π_ref) as its expectation, or nearly so:

    k1   d                    unbiased, high variance; as a loss its expected gradient on-policy is zero
    abs  |d|
    k2   ½ d²                 biased, low variance; its gradient is that of the KL
    k3   exp(−d) + d − 1      unbiased, never negative
    k1+, k3+                  the value of k1 or k3 with the gradient of k2

T tokens; log-probabilities in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from dovetail.errors import ConfigError, nearest

LOG_RATIO_BOUND = 20.0
"""Bound on |d| in k3, so that exp does not overflow."""
K3_BOUND = 10.0
"""Bound on the value of k3."""

Estimator: TypeAlias = Callable[[Float[Tensor, "T"]], Float[Tensor, "T"]]


def k1(difference_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Return the differences d = log π − log π_ref unchanged, float32 [T]."""
    return difference_T


def absolute(difference_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Compute |d| of the differences d = log π − log π_ref, float32 [T]."""
    return difference_T.abs()


def k2(difference_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Compute ½ d² of the differences d = log π − log π_ref, float32 [T]."""
    return 0.5 * difference_T.square()


def k3(difference_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Compute exp(−d) + d − 1, float32 [T], with d = log π − log π_ref clamped to ±20 and the result to ±10."""
    bounded_T = difference_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return ((-bounded_T).expm1() + bounded_T).clamp(-K3_BOUND, K3_BOUND)


def _straight_through(value: Estimator) -> Estimator:
    def estimator(difference_T: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        gradient_T = k2(difference_T)
        return gradient_T + (value(difference_T) - gradient_T).detach()

    return estimator


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "k1": k1,
        "abs": absolute,
        "k2": k2,
        "k3": k3,
        "k1+": _straight_through(k1),
        "k3+": _straight_through(k3),
    }
)
"""KL estimators by name: functions from d = log_probs − ref_log_probs, float32 [T], to the estimate, float32 [T]."""


def estimate_kl(
    estimator: str, log_probs_T: Float[Tensor, "T"], ref_log_probs_T: Float[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """Estimate the KL divergence to the reference policy at each token.

    Args:
        estimator: a name of `ESTIMATORS`.
        log_probs_T: float32 [T], of the policy; carries the gradient.
        ref_log_probs_T: float32 [T], of the reference policy.

    Returns:
        float32 [T], nats.

    Raises:
        ConfigError: the estimator does not exist.
    """
    if estimator not in ESTIMATORS:
        close = nearest(estimator, ESTIMATORS)
        raise ConfigError(
            f"there is no KL estimator {estimator!r}; expected one of {', '.join(ESTIMATORS)}",
            hint=f"did you mean {close!r}?" if close else None,
        )
    return ESTIMATORS[estimator](log_probs_T - ref_log_probs_T)
