"""The suites of the preflight rules."""

from __future__ import annotations

from dovetail_rewards.manager_rules import RewardModelMissing, RewardWorkers
from dovetail_rewards.overlong_twice import OverlongTwice
from dovetail_sdk.testing.conformance import PreflightConformance


class TestOverlongTwice(PreflightConformance):
    """The penalty in the manager, in the algorithm, and in both."""

    plugin = OverlongTwice
    sound = (
        ("reward.manager={name: dapo, max_response_length: 64, buffer: 8, factor: 1.0}",),
        ("algorithm.overlong_penalty={buffer: 8}",),
    )
    wrong = (
        (
            "reward.manager={name: dapo, max_response_length: 64, buffer: 8, factor: 1.0}",
            "algorithm.overlong_penalty={buffer: 8}",
        ),
    )


class TestRewardWorkers(PreflightConformance):
    """Workers of a runtime that starts none."""

    plugin = RewardWorkers
    sound = ((), ("reward.manager={name: remote, workers: 2}", "runtime.name=ray"))
    wrong = (("reward.manager={name: remote, workers: 2}",),)


class TestRewardModelMissing(PreflightConformance):
    """Directories that are not there, of a manager and of one within another; and hub ids."""

    plugin = RewardModelMissing
    sound = (
        (),
        ("reward.manager={name: reward_model, model: Skywork/Reward}",),
        ("reward.manager={name: hybrid, scorers: {rule: {}}}",),
    )
    wrong = (
        ("reward.manager={name: reward_model, model: /not/there}",),
        ("reward.manager={name: process_reward_model, model: ./not/there}",),
        (
            "reward.manager={name: hybrid, scorers: {a: {manager: {name: reward_model, model: /not/there}}}}",
        ),
    )
