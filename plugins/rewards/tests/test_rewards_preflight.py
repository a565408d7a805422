"""The preflight rules: configs that they find wrong, and such as they leave alone."""

from __future__ import annotations

import pytest

from dovetail_rewards.preflight import overlong_twice, reward_model_missing, reward_workers
from dovetail_sdk.testing import findings_of

DAPO = "reward.manager={name: dapo, max_response_length: 64, buffer: 8, factor: 1.0}"
PENALTY = "algorithm.overlong_penalty={buffer: 8}"


@pytest.mark.parametrize(
    ("rule", "overrides", "severities"),
    [
        (overlong_twice, [DAPO], []),
        (overlong_twice, [PENALTY], []),
        (overlong_twice, [DAPO, PENALTY], ["warning"]),
        (reward_workers, [], []),
        (reward_workers, ["reward.manager={name: remote, workers: 2}", "runtime.name=ray"], []),
        (reward_workers, ["reward.manager={name: remote, workers: 2}"], ["error"]),
        (reward_model_missing, [], []),
        (reward_model_missing, ["reward.manager={name: reward_model, model: Skywork/Reward}"], []),
        (reward_model_missing, ["reward.manager={name: hybrid, scorers: {rule: {}}}"], []),
        (reward_model_missing, ["reward.manager={name: reward_model, model: /not/there}"], ["error"]),
        (reward_model_missing, ["reward.manager={name: process_reward_model, model: ./not/there}"], ["error"]),
        (
            reward_model_missing,
            ["reward.manager={name: hybrid, scorers: {a: {manager: {name: reward_model, model: /not/there}}}}"],
            ["error"],
        ),
    ],
)  # fmt: skip
def test_what_a_rule_finds_in_a_config(rule, overrides, severities) -> None:
    assert [finding.severity for finding in findings_of(rule, *overrides)] == severities
