"""TeacherAdvantage: subtracts an estimate of the reverse KL to the teacher from the advantage of each token.

    A'_t = a A_t − c clip(log π_old(y_t) − log π_teacher(y_t), ± max_divergence)

On samples of the policy, the expectation of the second term is −c KL(π_old ‖ π_teacher) at the token. A policy gradient on this term
minimises the reverse KL token by token, ignoring the effect on later tokens (Thinking Machines Lab, "On-Policy
Distillation", 2025). MiniLLM, arXiv 2306.08543, and GKD, arXiv 2306.13649, minimise the same divergence. Legend: T response tokens,
packed end to end.
"""

from __future__ import annotations

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PlanFacts, Stage, StepContext
from dovetail_distillation.columns import LOG_PROBS
from dovetail_distillation.config import TeacherAdvantageConfig


class TeacherAdvantage(Stage):
    """Replaces `advantages` by A' of the module's equation, one value per token."""

    name = "teacher_advantage"
    api = ">=1.0,<2"
    phase = "estimate"
    after = ("advantage",)
    Config = TeacherAdvantageConfig

    @classmethod
    def requires(cls, config: TeacherAdvantageConfig, facts: PlanFacts) -> frozenset[str]:
        columns = frozenset({"response_mask", "old_log_probs", LOG_PROBS})
        return columns | {"advantages"} if config.reward_coef else columns

    @classmethod
    def rewrites(cls, config: TeacherAdvantageConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"advantages"})

    @classmethod
    def because(cls, config: TeacherAdvantageConfig, facts: PlanFacts) -> str | None:
        return (
            f"reverse KL to the teacher, coef {config.coef:g}; rewards, coef {config.reward_coef:g}"
        )

    def run(self, batch: Batch, step: StepContext) -> Batch:
        """Add the teacher's term to the advantages. The metric `distill/reverse_kl` is the mean of log π_old − log π_teacher in nats a
        token.
        """
        mask: Ragged = batch["response_mask"]
        shown_T = mask.values
        least, most = self.config.min_log_prob, self.config.max_divergence
        old_T, teacher_T = (
            np.maximum(batch[name].values.astype(np.float64), -np.inf if least is None else least)
            for name in ("old_log_probs", LOG_PROBS)
        )
        away_T = np.where(shown_T, old_T - teacher_T, 0.0)
        if most is not None:
            away_T = away_T.clip(-most, most)
        values_T = -self.config.coef * away_T
        if self.config.reward_coef:
            advantages = batch["advantages"]
            if not isinstance(advantages, Ragged):
                advantages = mask.with_values(np.repeat(advantages, mask.lengths))
            values_T += self.config.reward_coef * advantages.values
        tokens = int(shown_T.sum())
        step.metrics["distill/reverse_kl"] = float(away_T.sum()) / tokens if tokens else 0.0
        written = mask.with_values(np.where(shown_T, values_T, 0.0).astype(np.float32))
        return batch.with_columns({"advantages": written})
