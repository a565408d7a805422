"""What the chosen loss and rollout correction need of a step: which policy is the old one, and where the correction acts."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import PlanFacts, SelectedPlugin


def correction_of(facts: PlanFacts) -> SelectedPlugin | None:
    """Return the rollout correction; None where none is configured."""
    return facts.plugins.get("algorithm.rollout_correction")


def rollout_is_old(facts: PlanFacts) -> bool:
    """Return whether the rollout's log-probabilities are taken for the old ones: a correction in bypass mode, or stale samples without any."""
    mode = _mode(facts)
    return mode == "bypass" or (mode == "disabled" and facts.age > 0)


def corrects_before(facts: PlanFacts) -> bool:
    """Return whether the rollout correction is computed over the whole batch, before the first update."""
    correction = correction_of(facts)
    if correction is None or _mode(facts) != "decoupled":
        return False
    whole: bool = correction.cls.before_update(correction.config)
    return whole or facts.updates_per_step > 1 or "old_log_probs" in facts.required


def corrects_within(facts: PlanFacts) -> bool:
    """Return whether it is computed in every micro-batch of the update, from the current log-probabilities."""
    return _mode(facts) != "disabled" and not corrects_before(facts)


def current_is_old(facts: PlanFacts) -> bool:
    """Return whether the old log-probabilities are the current ones: one update a rollout, and nothing reads them before it."""
    loss = facts.plugins["algorithm.policy_loss"]
    read_before: frozenset[str] = loss.cls.prepares(loss.config)
    return (
        facts.updates_per_step == 1
        and not rollout_is_old(facts)
        and "old_log_probs" not in facts.required.keys() | read_before
    )


def samples_are_masked(facts: PlanFacts) -> bool:
    """Return whether samples have a `loss_mask`, because a filter masks some."""
    source = facts.plugins["source"]
    return "loss_mask" in source.cls.gives(source.config, facts)


def uses_critic(facts: PlanFacts) -> bool:
    """Return whether something requires a value function."""
    return "values" in facts.required


def _mode(facts: PlanFacts) -> Any:
    correction = correction_of(facts)
    return "disabled" if correction is None else correction.cls.mode(correction.config)
