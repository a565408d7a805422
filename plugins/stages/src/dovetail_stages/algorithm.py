"""Facts of a step that follow from its loss and rollout correction: which policy is the old policy, and where the correction acts."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import PlanFacts, SelectedPlugin


def correction_of(facts: PlanFacts) -> SelectedPlugin | None:
    """Return the rollout correction; None if none is configured.

    A rollout correction weights or rejects tokens by the ratio of the training policy to the rollout policy.
    """
    return facts.plugins.get("algorithm.rollout_correction")


def rollout_is_old(facts: PlanFacts) -> bool:
    """Return whether the rollout's log-probabilities serve as `old_log_probs`.

    True if the rollout correction has mode `bypass`, which takes the rollout policy as the old policy. Also true if there is no correction,
    and samples may come from older weights than the trainer's.
    """
    mode = _mode(facts)
    return mode == "bypass" or (mode == "disabled" and facts.age > 0)


def corrects_before(facts: PlanFacts) -> bool:
    """Return whether the rollout correction's weights and rejections are computed over the whole batch, before the first update."""
    correction = correction_of(facts)
    if correction is None or _mode(facts) != "decoupled":
        return False
    whole: bool = correction.cls.before_update(correction.config)
    return whole or facts.updates_per_step > 1 or "old_log_probs" in facts.required


def corrects_within(facts: PlanFacts) -> bool:
    """Return whether the rollout correction's weights and rejections are computed in every micro-batch, from current log-probabilities."""
    return _mode(facts) != "disabled" and not corrects_before(facts)


def current_is_old(facts: PlanFacts) -> bool:
    """Return whether the current log-probabilities serve as `old_log_probs`.

    True if one update follows each rollout and nothing reads `old_log_probs` before the update.
    """
    loss = facts.plugins["algorithm.policy_loss"]
    read_before: frozenset[str] = loss.cls.prepares(loss.config)
    return (
        facts.updates_per_step == 1
        and not rollout_is_old(facts)
        and "old_log_probs" not in facts.required.keys() | read_before
    )


def samples_are_masked(facts: PlanFacts) -> bool:
    """Return whether a sample filter masks samples, so that the batch has a `loss_mask`."""
    source = facts.plugins["source"]
    return "loss_mask" in source.cls.gives(source.config, facts)


def uses_critic(facts: PlanFacts) -> bool:
    """Return whether any plugin requires `values`, which a critic computes."""
    return "values" in facts.required


def _mode(facts: PlanFacts) -> Any:
    correction = correction_of(facts)
    return "disabled" if correction is None else correction.cls.mode(correction.config)
