"""Rules about the KL penalty to the reference policy."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.preflight.selected import kl_in_loss_of
from dovetail.sections import RunConfig


class KlTwice(PreflightRule):
    """The KL penalty is both in the loss and in the reward: it counts twice, and neither coefficient means what it says."""

    name = "kl_twice"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        in_loss, in_reward = kl_in_loss_of(config), config.algorithm.kl.in_reward
        if in_loss is not None and in_reward is not None and in_reward.coef:
            yield self.warning(
                f"algorithm.kl.in_loss.coef = {in_loss.coef:g} and algorithm.kl.in_reward.coef = "
                f"{in_reward.coef:g}: the policy is held near the reference twice",
                hint="set algorithm.kl.in_loss=null or algorithm.kl.in_reward=null",
            )


class K1InLoss(PreflightRule):
    """The KL penalty in the loss uses the estimator k1, whose gradient is zero in expectation on-policy.

    k1 is log π − log π_ref. Its gradient is the score function, whose mean under π is zero: the penalty shows in the
    metrics, and adds noise, but holds nothing back (joschu.net/blog/kl-approx.html).
    """

    name = "k1_in_loss"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        kl = kl_in_loss_of(config)
        if kl is not None and kl.estimator == "k1":
            yield self.warning(
                f"algorithm.kl.in_loss.estimator = k1 with coef = {kl.coef:g}: its expected gradient on-policy is "
                "zero, so it holds the policy near nothing",
                hint="set algorithm.kl.in_loss.estimator=k3, or k1+ for k1's value with a gradient; "
                "or put the penalty into the reward (algorithm.kl.in_reward), where k1 is right",
            )
