"""`dapo`: `naive` with the soft punishment of overlong responses in the score."""

from __future__ import annotations

import attrs
import numpy as np

from dovetail.interfaces import Failure, FailureKind, Outcome, RunningTime, Sample
from dovetail_rewards.manager_config import DapoConfig
from dovetail_rewards.managers.naive import NaiveManager

COMPONENT = "overlong"
"""The component that holds the penalty."""


class DapoManager(NaiveManager):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) inside the manager.

    score + penalty, penalty = −clip((length − (max − buffer)) / buffer, 0, 1) · factor

    with lengths in tokens; the penalty is the component `overlong`, and lies on the last token of token rewards.
    `algorithm.overlong_penalty` does the same for every manager, after scoring, and leaves the reward's own figures
    as they were: prefer it, and never use both.

    In a config:

        reward: {manager: {max_response_length: "${data.max_response_length}"}}
    """

    name = "dapo"
    Config = DapoConfig

    async def _score(self, sample: Sample, time: RunningTime) -> Outcome:
        outcome = await super()._score(sample, time)
        if isinstance(outcome, Failure):
            return outcome
        if sample.completion is None:
            return Failure(
                kind=FailureKind.INVALID_VALUE,
                message=f"reward manager 'dapo' can't tell the length of {sample.sample_id}: it has no response_ids",
            )
        penalty = self._penalty(sample.response_length)
        rewards_T = outcome.on_tokens(sample)
        if rewards_T is not None and len(rewards_T):
            rewards_T = np.array(rewards_T, np.float32)
            rewards_T[-1] += penalty
        return attrs.evolve(
            outcome,
            value=outcome.value + penalty,
            token_rewards=rewards_T,
            turn_rewards=None,
            components={**outcome.components, COMPONENT: penalty},
        )

    def _penalty(self, length: int) -> float:
        """From −factor to 0."""
        config = self.config
        over: int = length - (config.max_response_length - config.buffer)
        share = min(max(over / int(config.buffer), 0.0), 1.0)
        return 0.0 - share * float(config.factor)  # 0, not −0
