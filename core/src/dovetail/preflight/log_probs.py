"""Rules about the rollout's log-probabilities: missing, of another distribution, or asked for and not used."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.preflight.selected import (
    correction_of,
    generates,
    policy_loss_of,
    ratio_columns,
    selected,
)
from dovetail.sections import RunConfig


class TruncatedLogProbs(PreflightRule):
    """Something computes with the rollout's log-probabilities, but they are of a truncated distribution.

    Under top-p, top-k or a setting of the engine's own (`RolloutSection.truncation`) the engine's probabilities are
    shared among the tokens that are left, while the trainer's are over all of them: every rollout probability is too high
    by the mass that was cut, and ratios and weights carry that as a bias. The log-probability check allows for it by itself.
    """

    name = "truncated_log_probs"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        reader = None if plan is None else plan.facts.required.get("rollout_log_probs")
        cuts = {f"rollout.{key}": cut for key, cut in config.rollout.truncation().items()}
        if cuts and reader is not None:
            yield self.warning(
                f"{' and '.join(f'{key} = {value}' for key, (value, _) in cuts.items())}: the rollout's log-probabilities are "
                f"of the truncated distribution, but {reader} compares them with the trainer's, which are of the "
                "whole one",
                hint="set " + " ".join(f"{key}={whole}" for key, (_, whole) in cuts.items()),
            )


class CorrectionWithoutLogProbs(PreflightRule):
    """A rollout correction is asked for, but the rollout engine gives no log-probabilities to correct by."""

    name = "correction_without_log_probs"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        correction = correction_of(config)
        engine = selected("rollout", config.rollout)
        if correction is None or engine is None or not generates(config):
            return
        if "logprobs" in engine.cls.capabilities:
            return
        yield self.error(
            f"algorithm.rollout_correction = {correction.name} compares the rollout's log-probabilities with the "
            f"trainer's, but rollout.name = {engine.name} has none to give (it lacks the capability 'logprobs')",
            hint="set algorithm.rollout_correction=null, or choose an engine with that capability "
            "(`dovetail plugins list rollout`)",
            instead_of="'rollout_log_probs'",
        )


class WeightsIgnored(PreflightRule):
    """A correction has importance weights, but the loss has a ratio to the rollout policy, so that they are never used.

    A loss such as `dppo` is anchored on the rollout policy. In bypass mode the rollout policy is the old one, so that the
    ratio of a loss such as PPO's already is the correction. Weights besides would correct twice: they are left out,
    and only rejection works.
    """

    name = "weights_ignored"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        correction = correction_of(config)
        loss = policy_loss_of(config)
        if correction is None or loss is None:
            return
        weights = getattr(correction.config, "weights", None)
        bypass = correction.cls.mode(correction.config) == "bypass"
        anchors = {"rollout_log_probs"} | ({"old_log_probs"} if bypass else set())
        if weights is not None and ratio_columns(loss) & anchors:
            yield self.warning(
                f"algorithm.rollout_correction = {correction.name} weighs by {weights}, but "
                f"algorithm.policy_loss = {loss.name} has a ratio to the rollout policy itself, so the weights are "
                "not used",
                hint="set algorithm.policy_loss=reinforce, or algorithm.rollout_correction=bypass_ppo_clip "
                "where the ratio is what you want",
            )


class LogProbCheckNeverFires(PreflightRule):
    """The log-probability check is set so that it never measures, never warns, or stops a run before it has warned."""

    name = "logprob_check_never_fires"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        section = config.algorithm.logprob_check
        key = "algorithm.logprob_check"
        if not generates(config):
            return
        if section.warn_above >= 1:
            yield self.warning(
                f"{key}.warn_above = {section.warn_above:g} is never passed: two probabilities differ by less than 1",
                hint=f"set {key}.warn_above=0.01",
            )
        if section.stop_above is not None and section.stop_above >= 1:
            yield self.warning(
                f"{key}.stop_above = {section.stop_above:g} is never passed: two probabilities differ by less than 1",
                hint=f"set {key}.stop_above=0.1, or null to never stop",
            )
        elif section.stop_above is not None and section.stop_above < section.warn_above:
            yield self.warning(
                f"{key}.stop_above = {section.stop_above:g} is below {key}.warn_above = {section.warn_above:g}: "
                "the run stops before it has ever warned",
                hint=f"set {key}.warn_above={section.stop_above / 10:g}, or {key}.stop_above=null to never stop",
            )
        if plan is not None:
            yield from self._never_measures(config, plan)

    def _never_measures(self, config: RunConfig, plan: Plan) -> Iterator[Finding]:
        section, steps = config.algorithm.logprob_check, plan.counts.steps
        standard = type(section)()
        if not plan.has_stage("logprob_check"):
            # Nothing can be done about the engine: that is worth a line only where the check was asked for.
            if section != standard:
                yield self.warning(
                    f"algorithm.logprob_check can't measure: rollout.name = {plan.refs['rollout'].name} gives no "
                    "log-probabilities (it lacks the capability 'logprobs')",
                    hint="leave algorithm.logprob_check out, or choose an engine with that capability",
                )
        elif section.every == 0 and "rollout_log_probs" not in plan.on_request:
            # 0 alone is how the check is turned off; bounds besides say that it was not meant so.
            if attrs.evolve(section, every=standard.every) != standard:
                yield self.warning(
                    "algorithm.logprob_check.every = 0 measures only where the rollout's log-probabilities are there anyway, "
                    "and nothing in this config asks for them: its bounds are never looked at",
                    hint="set algorithm.logprob_check.every=10",
                )
        elif steps is not None and section.every > max(steps, standard.every):
            yield self.warning(
                f"algorithm.logprob_check.every = {section.every} is more than the run's {steps} steps: it measures at the "
                "first step and never again",
                hint=f"set algorithm.logprob_check.every={max(1, steps // 4)}",
            )
