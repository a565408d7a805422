"""The conformance suite of ReasoningGym, for this package's tests and for `dovetail plugins check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail_environments import EnvironmentTask
from dovetail_environments.testing import EnvironmentConformance
from dovetail_environments_reasoning_gym.config import ReasoningGymConfig
from dovetail_environments_reasoning_gym.reasoning_gym_tasks import ReasoningGym


class TestReasoningGym(EnvironmentConformance):
    """The conformance tests of environments, run on two datasets of Reasoning Gym."""

    plugin = ReasoningGym

    def make_config(self) -> Any:
        return ReasoningGymConfig(
            name="reasoning_gym",
            datasets={"chain_sum": {"max_terms": 3}, "coin_flip": {}},
            tasks=10,
            held_out=6,
        )

    def solution(self, task: EnvironmentTask) -> Sequence[str]:
        return [f"I think so. <answer>{task.ground_truth}</answer>"]
