"""EnvironmentReward: the reward function that returns the score of the row's environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth, RewardFunction


class EnvironmentReward(RewardFunction):
    """The reward of an episode of the agent loop `environments`, with components by environment: `NAME/reward`, `NAME/PART`."""

    name = "environment"
    api = ">=1.3,<2"

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
        *,
        trajectory: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return the score that the environment gave, and its components.

        Args:
            data_source: unused.
            solution_str: unused.
            ground_truth: unused.
            extra_info: unused.
            trajectory: the record of the episode, as JSON values.

        Raises:
            ValueError: the sample was not made by an environment.
        """
        output = (trajectory or {}).get("output")
        if not isinstance(output, Mapping) or "environment" not in output:
            raise ValueError(
                "reward function 'environment' can't score this sample: the sample was not made by the agent loop 'environments'; set "
                "rollout.agent_loop.name=environments, or another reward.function"
            )
        name = output["environment"]
        parts = {"reward": output["reward"], **output["parts"]}
        return {"score": output["reward"], **{f"{name}/{part}": v for part, v in parts.items()}}
