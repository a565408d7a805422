"""The conformance suites of this package's plugins, which `dovetail plugins check` runs. Legend: T tokens, K words, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from dovetail.batch import Batch
from dovetail_distillation.columns import LOG_PROBS, TOP_LOG_PROBS
from dovetail_distillation.config import DistillConfig, TeacherAdvantageConfig
from dovetail_distillation.objective import Distill
from dovetail_distillation.score_teacher import ScoreTeacher
from dovetail_distillation.teacher_advantage import TeacherAdvantage
from dovetail_sdk.testing.conformance import ObjectiveConformance, StageConformance

VOCABULARY, WORDS = 12, 3
STEP = 1e-5


def plain_divergence(
    name: str, tail: str, beta: float, teacher_TK: np.ndarray, student_TK: np.ndarray
) -> np.ndarray:
    """Compute each token's divergence directly from its definition, float64 [T], to test the module `divergences`.

    Args:
        name: the divergence: `forward_kl`, `reverse_kl` or `jsd`.
        tail: the treatment of words beyond the K: `bucket` or `renormalize`.
        beta: the teacher's weight in the mixture of `jsd`.
        teacher_TK: the teacher's log-probabilities of its K most likely words, [T, K].
        student_TK: the student's log-probabilities of the same words, [T, K].
    """

    def whole(log_probs_TK: np.ndarray) -> np.ndarray:
        pi_TK: np.ndarray = np.exp(log_probs_TK)
        mass_T1 = pi_TK.sum(-1, keepdims=True)
        if tail == "renormalize":
            return np.asarray(pi_TK / mass_T1)
        return np.concatenate([pi_TK, 1 - mass_T1], axis=-1)

    def kl(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.asarray((one * np.log(one / other)).sum(-1))

    p, q = whole(teacher_TK), whole(student_TK)
    mixture = beta * p + (1 - beta) * q
    if name == "jsd":
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    return kl(p, q) if name == "forward_kl" else kl(q, p)


def slope(loss: Callable[[np.ndarray], np.ndarray], at_TK: np.ndarray) -> np.ndarray:
    """Return the derivatives, [T, K], of each token's loss with respect to the token's own K inputs, from central differences."""
    slopes = np.zeros_like(at_TK)
    for word in range(at_TK.shape[1]):
        moved = np.zeros_like(at_TK)
        moved[:, word] = STEP
        slopes[:, word] = (loss(at_TK + moved) - loss(at_TK - moved)) / (2 * STEP)
    return slopes


def random_log_probs(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return log-probabilities of the first K words of random distributions over V words, float32 [T, K]."""
    logits_TV = rng.normal(size=(tokens, VOCABULARY))
    log_pi_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return np.asarray(log_pi_TV[:, :WORDS].astype(np.float32))


class TestDistill(ObjectiveConformance):
    """The objective `distill` with forward KL over the teacher's K most likely words and one bucket for all other words."""

    plugin = Distill
    config: ClassVar[Any] = DistillConfig(name="distill", top_k=WORDS, coef=0.7)

    def mini_batch(self, seed: int) -> Batch:
        batch = super().mini_batch(seed)
        if TOP_LOG_PROBS not in batch:
            return batch
        mask = batch["response_mask"]
        values_TK = random_log_probs(mask.total, np.random.default_rng([seed, 2]))
        shown_TK = np.where(mask.values[:, None], values_TK, np.float32(0))
        return batch.with_columns({TOP_LOG_PROBS: mask.with_values(shown_TK)})

    def outputs(self, mini_batch: Batch, seed: int) -> dict[str, np.ndarray]:
        found = super().outputs(mini_batch, seed)
        if "log_probs_at" in found:
            rng = np.random.default_rng([seed, 3])
            found["log_probs_at"] = random_log_probs(len(found["log_probs_at"]), rng)
        return found

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and its gradient with respect to the student's log-probabilities, [T, K].

        The loss is c Σ D / T, with c the config's `coef` and D the divergences of the T tokens.
        """
        config, shown_T = self.config, mini_batch["response_mask"].values
        teacher_TK = mini_batch[TOP_LOG_PROBS].values.astype(np.float64)[shown_T]
        student_TK = outputs["log_probs_at"].astype(np.float64)
        weight = config.coef / shown_T.sum()

        least = -np.inf if config.min_log_prob is None else config.min_log_prob
        most = config.max_divergence or np.inf

        def of(student: np.ndarray) -> np.ndarray:
            both = np.maximum(teacher_TK, least), np.maximum(student, least)
            own = plain_divergence(config.divergence, config.tail, config.beta, *both)
            return np.asarray(own.clip(-most, most) * weight)

        gradient_TK = np.zeros_like(student_TK)
        gradient_TK[shown_T] = slope(of, student_TK[shown_T])
        return float(of(student_TK[shown_T]).sum()), {"log_probs_at": gradient_TK}


class TestDistillBounded(TestDistill):
    """The objective `distill` with bounds on log-probabilities and on the divergence."""

    config: ClassVar[Any] = DistillConfig(
        name="distill", top_k=WORDS, min_log_prob=-2.5, max_divergence=0.3
    )


class TestDistillReverse(TestDistill):
    """The objective `distill` with reverse KL over the teacher's K most likely words and one bucket for all other words."""

    config: ClassVar[Any] = DistillConfig(name="distill", top_k=WORDS, divergence="reverse_kl")


class TestDistillJensenShannon(TestDistill):
    """The objective `distill` with the generalised Jensen–Shannon divergence over the teacher's K most likely words alone."""

    config: ClassVar[Any] = DistillConfig(
        name="distill", top_k=WORDS, divergence="jsd", beta=0.3, tail="renormalize"
    )


class TestDistillByToken(TestDistill):
    """The objective `distill` with an estimate of the reverse KL from the sampled token alone."""

    config: ClassVar[Any] = DistillConfig(name="distill", divergence="k2", coef=0.5)

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and its gradient with respect to log π, [T].

        The loss is c Σ ½ d² / T, with c the config's `coef` and d = log π − log π_teacher at each of T tokens.
        """
        shown_T = mini_batch["response_mask"].values
        away_T = outputs["log_probs"].astype(np.float64) - mini_batch[LOG_PROBS].values
        away_T = np.where(shown_T, away_T, 0) * self.config.coef / shown_T.sum()
        loss = 0.5 * away_T**2 * shown_T.sum() / self.config.coef
        return float(loss.sum()), {"log_probs": away_T}


TestScoreTeacher = StageConformance.of(
    ScoreTeacher,
    overrides=(
        "roles.teacher.path=tiny",
        "actor.objective={name: distill, top_k: 4}",
    ),
    required=dict.fromkeys((LOG_PROBS, "teacher_top_ids", TOP_LOG_PROBS), "objective 'distill'"),
)
TestTeacherAdvantage = StageConformance.of(
    TeacherAdvantage, TeacherAdvantageConfig(name="teacher_advantage", coef=0.5)
)
