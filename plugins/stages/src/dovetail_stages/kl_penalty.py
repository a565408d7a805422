"""KlPenalty: a penalty on the KL to the reference policy, subtracted from each token's reward.

R'_t = R_t − coef · KL_t · m_t, where m_t is 1 if `response_mask` is True at token t, else 0. Legend: T response tokens, packed end to
end.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail_stages.numerics.kl import estimate_kl
from dovetail_stages.wording import kl_words

CONTROLLER = "algorithm.kl.in_reward.controller"


class KlPenalty(Stage):
    """Subtracts a penalty on the KL to the reference policy from `token_rewards`, and each sample's total penalty from `scores`."""

    name = "kl_penalty"
    api = ">=1.0,<2"
    phase = "transform"
    after = ("overlong_penalty",)

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, str]:
        columns = ("token_rewards", "scores", "response_mask", "old_log_probs", "ref_log_probs")
        return dict.fromkeys(columns, "algorithm.kl.in_reward")

    @classmethod
    def rewrites(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"token_rewards", "scores"})

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        kl = facts.config.algorithm.kl.in_reward
        return (
            f"algorithm.kl.in_reward ({kl_words(facts, 'in_reward')})" if kl and kl.coef else None
        )

    def run(self, batch: Batch, step: StepContext) -> Batch:
        """Return the batch with the penalty subtracted, and record the mean KL and the KL weight as metrics.

        `reward/kl_penalty` is the mean KL in nats a token, not yet multiplied by the weight; `reward/kl_coef` is the weight.
        """
        section = step.config.algorithm.kl.in_reward
        assert section is not None
        coef = section.coef * step.plugins[CONTROLLER].value
        kl_T = masked_kl(batch, section.estimator)
        tokens = int(batch["response_mask"].values.sum())
        mean_kl = float(kl_T.sum(dtype=np.float64)) / tokens if tokens else 0.0
        step.metrics |= {"reward/kl_penalty": mean_kl, "reward/kl_coef": coef}
        return with_kl_penalty(batch, coef * kl_T)

    def step_counted(self, batch: Batch, step: StepContext) -> None:
        """Update the controller of the KL weight with the KL to the reference, if the policy was updated."""
        if step.updates["actor"] and "reward/kl_penalty" in step.metrics:
            step.plugins[CONTROLLER].update(step.metrics["reward/kl_penalty"], len(batch))


def masked_kl(batch: Batch, estimator: str) -> Float32[np.ndarray, "T"]:
    """Return the KL to the reference policy at each token, float32 [T], in nats; 0 where the mask is False.

    Args:
        batch: needs `response_mask`, `old_log_probs` and `ref_log_probs` (ragged, nats).
        estimator: a name of `dovetail_stages.numerics.kl.ESTIMATORS`.
    """
    mask_T = batch["response_mask"].values
    kl_T = np.zeros(len(mask_T), np.float32)
    old_K, ref_K = (
        torch.from_numpy(batch[name].values[mask_T]) for name in ("old_log_probs", "ref_log_probs")
    )
    kl_T[mask_T] = estimate_kl(estimator, old_K, ref_K).numpy()
    return kl_T


def with_kl_penalty(batch: Batch, penalty_T: Float32[np.ndarray, "T"]) -> Batch:
    """Return the batch with a penalty, float32 [T], subtracted from `token_rewards`, and each sample's total penalty from `scores`."""
    rewards = batch["token_rewards"]
    rewards_T = rewards.values.astype(np.float64) - penalty_T
    penalty_N = rewards.with_values(penalty_T).sum()
    return batch.with_columns(
        {
            "token_rewards": rewards.with_values(rewards_T.astype(np.float32)),
            "scores": (batch["scores"].astype(np.float64) - penalty_N).astype(np.float32),
        }
    )
