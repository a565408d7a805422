"""Reward shaping: what is added to the rewards before advantages. N samples, T response tokens, packed end to end.

R'_t = R_t + penalty · [t is the last token with mask 1] − coef · KL_t · m_t
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.numerics.kl import estimate_kl

if TYPE_CHECKING:
    from dovetail.sections.algorithm import KlInRewardSection, OverlongPenaltySection


@attrs.frozen(kw_only=True, eq=False)
class ShapedRewards:
    """A batch whose `token_rewards` and `scores` are shaped."""

    batch: Batch
    metrics: Mapping[str, float]
    """`reward/overlong_…` and `reward/kl_…`; the figures of the raw reward are not touched."""
    kl: float | None = None
    """Mean KL to the reference policy in nats a token, which the KL controller learns; None without such a penalty."""


def shape_rewards(
    batch: Batch,
    *,
    overlong: OverlongPenaltySection | None,
    max_response_length: int,
    kl: KlInRewardSection | None,
    kl_factor: float = 1.0,
) -> ShapedRewards:
    """Add the penalties that the config asks for; without any, the batch comes back as it is.

    `scores` become the sums of the token rewards. A sample without a token keeps its score apart from them.

    Args:
        batch: needs `scores` float32 [N], `token_rewards` and `response_mask` (ragged), and for a KL penalty
            `old_log_probs` and `ref_log_probs` (ragged, nats).
        overlong: a penalty on responses that come near the length limit.
        max_response_length: that limit, in tokens.
        kl: a penalty on the KL to the reference policy.
        kl_factor: the KL controller's factor on its coefficient.
    """
    metrics: dict[str, float] = {}
    mean_kl = None
    if overlong is not None:
        lengths_N = batch["response_mask"].lengths
        penalty_N = overlong_penalty(lengths_N, max_response_length, overlong)
        batch = _with_penalty(batch, penalty_N)
        if len(batch):
            metrics["reward/overlong_penalty"] = float(penalty_N.mean())
            metrics["reward/overlong_share"] = float((penalty_N < 0).mean())
    if kl is not None:
        coef = kl.coef * kl_factor
        kl_T = _masked_kl(batch, kl.estimator)
        batch = _with_kl(batch, coef * kl_T)
        tokens = int(batch["response_mask"].values.sum())
        mean_kl = float(kl_T.sum(dtype=np.float64)) / tokens if tokens else 0.0
        metrics |= {"reward/kl_penalty": mean_kl, "reward/kl_coef": coef}
    return ShapedRewards(batch=batch, metrics=metrics, kl=mean_kl)


def overlong_penalty(
    lengths_N: Int64[np.ndarray, "N"], max_response_length: int, section: OverlongPenaltySection
) -> Float64[np.ndarray, "N"]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    penalty = clip(−(length − (max − buffer)) / buffer, −1, 0) · factor

    Args:
        lengths_N: int64 [N], response tokens.
        max_response_length: the longest response allowed, in tokens.
        section: buffer in tokens, and factor.

    Returns:
        float64 [N], from −factor to 0.
    """
    expected = max_response_length - section.buffer
    share_N = np.clip((lengths_N - expected) / section.buffer, 0.0, 1.0)
    # 0 − x and not −x: no penalty is 0, not −0.
    return np.asarray(0.0 - share_N * section.factor)


def last_policy_tokens(
    mask: Ragged,
) -> tuple[Int64[np.ndarray, "M"], Int64[np.ndarray, "M"]]:
    """Where rewards of whole samples sit: on each sample's last token with mask 1.

    Args:
        mask: bool, ragged: the response mask.

    Returns:
        The samples that have such a token, int64 [M], and its place among all T tokens, int64 [M].
    """
    places_K = np.flatnonzero(mask.values)
    samples_K = mask.row_index[places_K]
    last_K = np.append(samples_K[1:] != samples_K[:-1], True)[: len(samples_K)]
    return samples_K[last_K], places_K[last_K]


def _with_penalty(batch: Batch, penalty_N: Float64[np.ndarray, "N"]) -> Batch:
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


def _masked_kl(batch: Batch, estimator: str) -> Float32[np.ndarray, "T"]:
    """float32 [T]: KL to the reference policy at each token, 0 where the mask is."""
    mask_T = batch["response_mask"].values
    kl_T = np.zeros(len(mask_T), np.float32)
    old_K, ref_K = (
        torch.from_numpy(batch[name].values[mask_T]) for name in ("old_log_probs", "ref_log_probs")
    )
    kl_T[mask_T] = estimate_kl(estimator, old_K, ref_K).numpy()
    return kl_T


def _with_kl(batch: Batch, penalty_T: Float32[np.ndarray, "T"]) -> Batch:
    rewards = batch["token_rewards"]
    rewards_T = rewards.values.astype(np.float64) - penalty_T
    penalty_N = rewards.with_values(penalty_T).sum()
    return batch.with_columns(
        {
            "token_rewards": rewards.with_values(rewards_T.astype(np.float32)),
            "scores": (batch["scores"].astype(np.float64) - penalty_N).astype(np.float32),
        }
    )
