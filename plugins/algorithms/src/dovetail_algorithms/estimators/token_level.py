"""Helpers of the token-level estimators. T tokens, K of them the policy's own, N samples."""

from __future__ import annotations

import attrs
import numpy as np
from jaxtyping import Float64, Int64

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import AdvantageEstimator, PluginConfig, Reduction
from dovetail_stages import whiten


def following(
    values_K: Float64[np.ndarray, "K"], lengths_N: Int64[np.ndarray, "N"]
) -> Float64[np.ndarray, "K"]:
    """Return the value x_{k+1} that follows each value in its segment, float64 [K]; 0 for a segment's last value. `lengths_N` are the
    lengths of the segments.
    """
    following_K = np.append(values_K[1:], 0.0)[: len(values_K)]
    following_K[(np.cumsum(lengths_N) - 1)[lengths_N > 0]] = 0
    return following_K


def discounted_sums(
    values_K: Float64[np.ndarray, "K"],
    lengths_N: Int64[np.ndarray, "N"],
    decay: float | Float64[np.ndarray, "K"],
) -> Float64[np.ndarray, "K"]:
    """Return S_k = x_k + decay_k · S_{k+1} within segments of `lengths_N` values, float64 [K]; the decay is a scalar or [K]."""
    sums_K = values_K.copy()
    decay_K = np.broadcast_to(decay, sums_K.shape)
    # Each iteration goes one value back in all runs that are long enough. With the longest runs first, these are a prefix.
    order_N = np.argsort(-lengths_N, kind="stable")
    last_N, steps = np.cumsum(lengths_N)[order_N] - 1, np.arange(1, lengths_N.max(initial=1))
    counts = np.searchsorted(-lengths_N[order_N], -steps)
    for back, count in zip(steps.tolist(), counts.tolist(), strict=True):
        at = last_N[:count] - back
        sums_K[at] += decay_K[at] * sums_K[at + 1]
    return sums_K


@attrs.frozen(eq=False)
class PolicyTokens:
    """The tokens that the policy wrote, one sample after another. Sums over them skip the tool tokens in between, without a discount.

    Attributes:
        mask: ragged bool, `response_mask`.
        place_K: int64 [K], the index of each policy token among all T response tokens.
        lengths_N: int64 [N], number of policy tokens of each sample.
    """

    mask: Ragged
    place_K: Int64[np.ndarray, "K"]
    lengths_N: Int64[np.ndarray, "N"]

    @classmethod
    def of(cls, mask: Ragged) -> PolicyTokens:
        """Return the tokens on which a mask, bool, ragged [T], is True."""
        place_K = np.flatnonzero(mask.values)
        return cls(mask, place_K, np.diff(np.searchsorted(place_K, mask.offsets)))

    def take(self, column: Ragged) -> Float64[np.ndarray, "K"]:
        """Return a column's values at the policy's tokens, float64 [K]."""
        return column.values[self.place_K].astype(np.float64)

    def column(self, values_K: Float64[np.ndarray, "K"]) -> Ragged:
        """Return a ragged float32 column [T] with these values on the policy's tokens, and 0 on all others."""
        values_T = np.zeros(len(self.mask.values), np.float32)
        values_T[self.place_K] = values_K
        return self.mask.with_values(values_T)

    def following(self, values_K: Float64[np.ndarray, "K"]) -> Float64[np.ndarray, "K"]:
        """Return the value x_{k+1} of the next policy token at each token, float64 [K]; 0 at a sample's last token."""
        return following(values_K, self.lengths_N)

    def discounted_sums(
        self, values_K: Float64[np.ndarray, "K"], decay: float | Float64[np.ndarray, "K"]
    ) -> Float64[np.ndarray, "K"]:
        """Compute S_k = x_k + decay_k · S_{k+1} within each sample, float64 [K]; the decay is a scalar or [K]."""
        return discounted_sums(values_K, self.lengths_N, decay)

    def running_sums(self, values_K: Float64[np.ndarray, "K"]) -> Float64[np.ndarray, "K"]:
        """Compute Σ_{j≤k} x_j within each sample, float64 [K]."""
        return discounted_sums(values_K[::-1], self.lengths_N[::-1], 1.0)[::-1]

    def whitened(self, column: Ragged, reduction: Reduction) -> Ragged:
        """Compute (x − mean) / √(variance + 1e-8) of a float32 column [T], over the policy's tokens of all ranks."""
        return self.mask.with_values(whiten(column.values, self.mask.values, reduction))

    @property
    def last_N(self) -> Int64[np.ndarray, "N"]:
        """The index of each sample's last policy token among the batch's K policy tokens, int64 [N]."""
        return np.cumsum(self.lengths_N) - 1


class TokenEstimator(AdvantageEstimator):
    """An estimator that gives every token of the policy an advantage and a return; other tokens hold 0."""

    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    level = "token"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask"})

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages", "returns"})

    def policy_tokens(self, columns: Batch) -> PolicyTokens:
        """Return the tokens that `response_mask` selects, after checking that all required columns exist.

        Raises:
            ColumnError: a column is missing.
        """
        columns.require(sorted(self.requires(self.config)), f"advantage estimator {self.name!r}")
        mask: Ragged = columns["response_mask"]
        return PolicyTokens.of(mask.with_values(mask.values != 0))
