"""Properties of the algorithm that several rules read: its loss, its KL penalty, its rollout correction."""

from __future__ import annotations

from dovetail.planning import Selected, selected
from dovetail.sections import KlInLossSection, RunConfig


def policy_loss_of(config: RunConfig) -> Selected | None:
    """Return the policy loss; None if the actor has another objective."""
    own = config.actor.objective is not None
    return None if own else selected("policy_loss", config.algorithm.policy_loss)


def kl_in_loss_of(config: RunConfig) -> KlInLossSection | None:
    """Return the KL penalty in the policy loss; None if its coefficient is 0 or the actor has another objective."""
    kl = config.algorithm.kl.in_loss
    return kl if config.actor.objective is None and kl is not None and kl.coef else None


def correction_of(config: RunConfig) -> Selected | None:
    """Return the rollout correction, which weights or rejects tokens by the ratio of the training policy to the rollout policy.

    None if none is configured, or its mode is `disabled`.
    """
    correction = selected("rollout_correction", config.algorithm.rollout_correction)
    if correction is None or correction.cls.mode(correction.config) == "disabled":
        return None
    return correction


def ratio_columns(loss: Selected) -> frozenset[str]:
    """Return the columns of older policies' log-probabilities that a loss's ratio reads; empty for a loss without a ratio."""
    required: frozenset[str] = loss.cls.requires(loss.config)
    return required & {"old_log_probs", "rollout_log_probs"}
