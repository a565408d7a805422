"""EpisodeReward: the rewards of an episode's turns, as its tools and its agent loop gave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import GroundTruth, RewardFunction


class EpisodeReward(RewardFunction):
    """The sum of the rewards that tools and the agent loop gave.

    R = Σ_k r_k over turns k, with r_k on the last token of turn k: what `Session.reward` and `ToolResult.reward` gave.

    A sample that is one response to its prompt has no turns, and fails.
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
        """Return the score and the rewards of the turns.

        Args:
            data_source: not read.
            solution_str: not read.
            ground_truth: not read.
            extra_info: not read.
            trajectory: what happened in the episode, as JSON values.

        Raises:
            ValueError: there was no episode.
        """
        if trajectory is None:
            raise ValueError(
                "reward function 'episode' scores episodes of an agent loop, and this sample is one response; set "
                "rollout.agent_loop, or another reward.function"
            )
        return {"turn_rewards": [turn["reward"] for turn in trajectory["turns"]]}
