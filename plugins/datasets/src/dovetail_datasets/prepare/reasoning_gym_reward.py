"""The reward function `reasoning_gym`: scores a response by the scorer of its Reasoning Gym task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.errors import DataError
from dovetail.interfaces import GroundTruth, PluginConfig, RewardFunction
from dovetail_datasets.prepare.recipes.reasoning_gym import reasoning_gym, scored

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymReward(RewardFunction):
    """Scores the text between the last `<answer>` and `</answer>` by the task's own scorer in Reasoning Gym, from 0 to 1.

    Rows are those of `dovetail data prepare reasoning_gym:TASK`. Many tasks have several right answers, which the scorer knows.
    """

    name = "reasoning_gym"
    api = ">=1.0,<2"
    aliases = ("reasoning_gym/*",)
    capabilities = frozenset({"deterministic"})

    def start(self) -> None:
        reasoning_gym()

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return a mapping with `score`, `correct` (1 for the full score, else 0) and `pred` (the answer as written, or None).

        Raises:
            DataError: the row has no `extra_info` with `task` and `entry`.
        """
        answers = _ANSWER.findall(solution_str)
        if not answers:
            return {"score": 0.0, "correct": 0.0, "pred": None}
        try:
            task, entry = (extra_info or {})["task"], (extra_info or {})["entry"]
        except KeyError as error:
            raise DataError(
                f"the row's extra_info has no {error}; expected 'task' and 'entry'",
                hint="prepare the rows with `dovetail data prepare reasoning_gym:TASK`",
            ) from error
        pred = answers[-1].strip()
        score = scored(task, pred, entry)
        return {"score": score, "correct": float(score >= 1), "pred": pred}

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        return None if isinstance(ground_truth, str) else f"{ground_truth!r} is not a text"
