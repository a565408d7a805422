"""FromTeacher: what a teacher would rather say, in place of the reward (on-policy distillation, arXiv 2306.13649)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import Stage
from stagekit.config import FromTeacherConfig

if TYPE_CHECKING:
    from dovetail.interfaces import PlanFacts, StepContext

LOG_PROBS = frozenset({"log_probs"})


class FromTeacher(Stage):
    """A_t = log π_teacher,t − log π_old,t: the gradient of the reverse KL to the role `teacher`."""

    name = "from_teacher"
    api = ">=1.0,<2"
    Config = FromTeacherConfig
    phase = "estimate"
    after = ("advantage",)

    @classmethod
    def roles(cls, config: Any, facts: PlanFacts) -> tuple[str, ...]:
        return ("teacher",)

    @classmethod
    def requires(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs", "response_mask"})

    @classmethod
    def rewrites(cls, config: Any, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"advantages"})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        mask, old_T = batch["response_mask"], batch["old_log_probs"].values
        teacher_T = step.roles["teacher"].forward(batch, LOG_PROBS).result()["log_probs"].values
        gap_T = np.where(mask.values, teacher_T - old_T, 0).astype(np.float32)
        step.metrics["teacher/reverse_kl"] = -float(gap_T.sum() / mask.values.sum())
        return batch.with_columns({"advantages": mask.with_values(gap_T)})
