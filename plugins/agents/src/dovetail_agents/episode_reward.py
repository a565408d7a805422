"""EpisodeReward: the rewards of an episode's turns, as its tools and its agent loop gave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth, RewardFunction


class EpisodeReward(RewardFunction):
    """The sum of the rewards that tools and the agent loop gave.

    R = Σ_k r_k over turns k. The reward r_k, given by `Session.reward` and `ToolResult.reward`, is on the last token of turn k.

    A sample that is a single response without an episode fails.
    """

    name = "episode"
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
        """Return the rewards of the episode's turns as `turn_rewards`; the score is their sum.

        Args:
            data_source: not read.
            solution_str: not read.
            ground_truth: not read.
            extra_info: not read.
            trajectory: the record of the episode, as JSON values.

        Raises:
            ValueError: the sample has no episode.
        """
        if trajectory is None:
            raise ValueError(
                "reward function 'episode' can't score this sample: it is a single response, not an episode of an agent loop; set "
                "rollout.agent_loop, or another reward.function"
            )
        return {"turn_rewards": [turn["reward"] for turn in trajectory["turns"]]}
