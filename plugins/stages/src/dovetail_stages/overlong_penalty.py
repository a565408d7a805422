"""OverlongPenalty: DAPO's soft penalty on responses that come near the length limit (arXiv 2503.14476, eq. 13).

R'_t = R_t + penalty · [t is the last token with mask 1]. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail.sections import OverlongPenaltySection


class OverlongPenalty(Stage):
    """Penalises overlong responses in `token_rewards` and `scores`; a sample without a masked-in token only in `scores`."""

    name = "overlong_penalty"
    api = ">=1.0,<2"
    phase = "transform"

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"token_rewards", "scores", "response_mask"})

    @classmethod
    def rewrites(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"token_rewards", "scores"})

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        penalty = facts.config.algorithm.overlong_penalty
        if penalty is None:
            return None
        return f"algorithm.overlong_penalty (buffer {penalty.buffer}, factor {penalty.factor:g})"

    def run(self, batch: Batch, step: StepContext) -> Batch:
        section = step.config.algorithm.overlong_penalty
        assert section is not None
        lengths_N = batch["response_mask"].sum().astype(np.int64)
        penalty_N = overlong_penalty(lengths_N, step.config.data.max_response_length, section)
        step.metrics |= {
            "reward/overlong_penalty": float(penalty_N.mean()),
            "reward/overlong_share": float((penalty_N < 0).mean()),
        }
        return with_sample_penalty(batch, penalty_N)


def overlong_penalty(
    lengths_N: Int64[np.ndarray, "N"], max_response_length: int, section: OverlongPenaltySection
) -> Float64[np.ndarray, "N"]:
    """Return the length penalty of each sample.

    penalty = clip(−(length − (max − buffer)) / buffer, −1, 0) · factor

    Args:
        lengths_N: int64 [N], tokens that the policy produced.
        max_response_length: the longest response allowed, in tokens.
        section: the buffer in tokens, and the factor.

    Returns:
        float64 [N], from −factor to 0.
    """
    expected = max_response_length - section.buffer
    share_N = np.clip((lengths_N - expected) / section.buffer, 0.0, 1.0)
    # 0 − x instead of −x, so that no penalty is 0 and not −0.
    return np.asarray(0.0 - share_N * section.factor)


def last_policy_tokens(
    mask: Ragged,
) -> tuple[Int64[np.ndarray, "M"], Int64[np.ndarray, "M"]]:
    """Return the position of each sample's last token with mask 1, which holds the reward of the whole sample.

    Args:
        mask: bool, ragged: the response mask.

    Returns:
        The rows of the samples with such a token, int64 [M], and the token's index among all T tokens, int64 [M].
    """
    places_K = np.flatnonzero(mask.values)
    samples_K = mask.row_index[places_K]
    last_K = np.append(samples_K[1:] != samples_K[:-1], True)[: len(samples_K)]
    return samples_K[last_K], places_K[last_K]


def with_sample_penalty(batch: Batch, penalty_N: Float64[np.ndarray, "N"]) -> Batch:
    """Return the batch with a penalty added to `scores`, and to `token_rewards` at each sample's last token with mask 1.

    Args:
        batch: N samples.
        penalty_N: float64 [N], at most 0.
    """
    rewards = batch["token_rewards"]
    samples_M, places_M = last_policy_tokens(batch["response_mask"])
    rewards_T = rewards.values.astype(np.float64)
    rewards_T[places_M] += penalty_N[samples_M]
    return batch.with_columns(
        {
            "token_rewards": rewards.with_values(rewards_T.astype(np.float32)),
            "scores": (batch["scores"].astype(np.float64) + penalty_N).astype(np.float32),
        }
    )
