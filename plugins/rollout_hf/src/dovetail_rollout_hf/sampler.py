"""Sampling tokens with temperature, top-k, top-p or greedily; each row has its own settings and noise.

Legend: N rows, R restricted rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.interfaces import SamplingParams
from dovetail_rollout_hf.noise import log_exponential, vocabulary_counters


class Draw(NamedTuple):
    """The sampled token of every row, with log-probabilities."""

    tokens_N: Tensor
    """int64 [N], the token sampled for each row."""
    log_probs_N: Tensor | None
    """float32 [N], log-probabilities under the sampling distribution (after temperature, top-k and top-p); 0 for greedy rows. None
    if no row requests them."""
    raw_log_probs_N: Tensor | None
    """float32 [N], log-probabilities under the full softmax of logits / temperature (1 for greedy rows). None if no row requests them."""


class TokenSampler:
    """Samples one token per row by Gumbel-argmax over counter-based noise.

    The distribution is softmax(logits / temperature), cut to the `top_k` most likely tokens. It is then renormalised and cut to the
    smallest set of most likely tokens whose mass reaches `top_p`.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device) -> None:
        greedy = [row.temperature == 0 for row in rows]
        self._all_greedy = all(greedy)
        self._greedy_N1 = _column(greedy, torch.bool, device) if any(greedy) else None
        scales = [1.0 if row.temperature == 0 else 1.0 / row.temperature for row in rows]
        unit = all(scale == 1.0 for scale in scales)
        self._scale_N1 = None if unit else _column(scales, torch.float32, device)
        restricted = [
            index
            for index, row in enumerate(rows)
            if row.temperature != 0 and (row.top_k > 0 or row.top_p < 1)
        ]
        self._restriction = _Restriction(rows, restricted, device) if restricted else None
        self._log_probs = any(row.log_probs for row in rows)
        self._raw_log_probs = any(row.raw_log_probs for row in rows)
        self._counters_V: Tensor | None = None

    def draw(self, logits_NV: Tensor, low_N1: Tensor, high_N1: Tensor) -> Draw:
        """Sample one token per row from logits, float32 [N, V], with the low and high halves of each row's seed, int32 [N, 1]."""
        scores_NV = logits_NV if self._scale_N1 is None else logits_NV * self._scale_N1
        used_NV = scores_NV if self._restriction is None else self._restriction.apply(scores_NV)
        tokens_N1 = self._argmax(used_NV, low_N1, high_N1)
        raw_N1 = log_probs_N1 = None
        if self._raw_log_probs or (self._log_probs and self._restriction is None):
            raw_N1 = _log_prob(scores_NV, tokens_N1)
        if self._log_probs:
            restricted = self._restriction is not None
            log_probs_N1 = _log_prob(used_NV, tokens_N1) if restricted else raw_N1
            if self._greedy_N1 is not None and log_probs_N1 is not None:
                log_probs_N1 = log_probs_N1.masked_fill(self._greedy_N1, 0.0)
        return Draw(
            tokens_N1.squeeze(1),
            None if log_probs_N1 is None else log_probs_N1.squeeze(1),
            None if raw_N1 is None or not self._raw_log_probs else raw_N1.squeeze(1),
        )

    def _argmax(self, scores_NV: Tensor, low_N1: Tensor, high_N1: Tensor) -> Tensor:
        if self._all_greedy:
            return scores_NV.argmax(-1, keepdim=True)
        if self._counters_V is None:
            self._counters_V = vocabulary_counters(scores_NV.shape[1], scores_NV.device)
        noise_NV = log_exponential(low_N1, high_N1, self._counters_V)
        if self._greedy_N1 is not None:
            noise_NV = noise_NV.masked_fill_(self._greedy_N1, 0.0)
        return torch.sub(scores_NV, noise_NV, out=noise_NV).argmax(-1, keepdim=True)


class _Restriction:
    """Top-k and top-p limits of the restricted rows: rows that sample with `top_k` above 0 or `top_p` below 1."""

    def __init__(
        self, rows: Sequence[SamplingParams], index: list[int], device: torch.device
    ) -> None:
        self._everywhere = len(index) == len(rows)
        self._rows_R = torch.tensor(index, device=device)
        limits = [rows[i].top_k for i in index]
        self._most = max(limits) if min(limits) > 0 else None
        self._nucleus = any(rows[i].top_p < 1 for i in index)
        unlimited = torch.iinfo(torch.int64).max
        self._top_k_R1 = _column([k if k > 0 else unlimited for k in limits], torch.int64, device)
        self._top_p_R1 = _column([rows[i].top_p for i in index], torch.float32, device)

    def apply(self, scores_NV: Tensor) -> Tensor:
        """Return the scores with −∞ for tokens outside each row's top-k and top-p; unrestricted rows stay unchanged."""
        scores_RV = scores_NV if self._everywhere else scores_NV[self._rows_R]
        size = scores_RV.shape[1]
        count = size if self._most is None else min(self._most, size)
        best_RK, index_RK = torch.topk(scores_RV, count, dim=-1)
        rank_K = torch.arange(count, device=best_RK.device)
        outside_RK = rank_K >= self._top_k_R1
        if self._nucleus:
            probs_RK = best_RK.masked_fill(outside_RK, -torch.inf).softmax(-1)
            before_RK = probs_RK.cumsum(-1).sub_(probs_RK)
            # The most likely token always stays, even if rounding would exclude it.
            outside_RK |= (before_RK >= self._top_p_R1) & (rank_K > 0) & (self._top_p_R1 < 1)
        best_RK = best_RK.masked_fill_(outside_RK, -torch.inf)
        kept_RV = torch.full_like(scores_RV, -torch.inf).scatter_(1, index_RK, best_RK)
        return kept_RV if self._everywhere else scores_NV.index_copy(0, self._rows_R, kept_RV)


def _log_prob(scores_NV: Tensor, tokens_N1: Tensor) -> Tensor:
    """Return the tokens' log-probabilities, float32 [N, 1], without computing those of the whole vocabulary."""
    return scores_NV.gather(1, tokens_N1) - scores_NV.logsumexp(-1, keepdim=True)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
