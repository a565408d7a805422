"""Bonus, a column of its own, and AddBonus, which adds it to the rewards. N samples, T response tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.batch import Batch, Column
from dovetail.interfaces import Stage
from stagekit.config import AddBonusConfig, BonusConfig

if TYPE_CHECKING:
    from dovetail.interfaces import PlanFacts, StepContext

BONUS = Column("stagekit.bonus", "float32", "dense", "bonus of the sample", "stagekit")


class Bonus(Stage):
    """`stagekit.bonus`: `amount` for a response that ended by itself, 0 for one that was cut off."""

    name = "bonus"
    api = ">=1.0,<2"
    Config = BonusConfig
    phase = "transform"
    columns = (BONUS,)

    @classmethod
    def requires(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"finish_reason"})

    @classmethod
    def provides(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({BONUS.name})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        ended_N = np.array([reason == "stop" for reason in batch["finish_reason"]], np.bool_)
        bonus_N = np.where(ended_N, self.config.amount, 0.0).astype(np.float32)
        return batch.with_columns({BONUS.name: bonus_N})


class AddBonus(Stage):
    """Adds `stagekit.bonus` to `scores`, and to `token_rewards` at each sample's last token with mask 1."""

    name = "add_bonus"
    api = ">=1.0,<2"
    Config = AddBonusConfig
    phase = "transform"
    before = ("overlong_penalty", "kl_penalty")

    @classmethod
    def requires(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({BONUS.name, "scores", "token_rewards", "response_mask"})

    @classmethod
    def rewrites(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"scores", "token_rewards"})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        bonus_N, mask, rewards = batch[BONUS.name], batch["response_mask"], batch["token_rewards"]
        rewards_T = rewards.values.copy()
        for sample, bonus in enumerate(bonus_N):
            places = np.flatnonzero(mask[sample])
            if places.size:
                rewards_T[mask.offsets[sample] + places[-1]] += bonus
        step.metrics["stagekit/bonus"] = float(bonus_N.mean())
        return batch.with_columns(
            {"scores": batch["scores"] + bonus_N, "token_rewards": rewards.with_values(rewards_T)}
        )
