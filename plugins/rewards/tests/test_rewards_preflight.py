"""The preflight rules: configs with findings, and configs without."""

from __future__ import annotations

import pytest

from dovetail_rewards.preflight import reward_model_missing, reward_workers
from dovetail_sdk.testing import findings_of


@pytest.mark.parametrize(
    ("rule", "overrides", "severities"),
    [
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
