"""Covariances of each token's advantage with its log-probability over a mini-batch, and the selection of tokens by covariance.

Tokens with a high covariance lower the entropy most (arXiv 2505.22617). Covariances are computed from `old_log_probs` before the
mini-batch is split, so that micro-batches, ranks and order change nothing. N samples and T tokens of this rank.
"""

from __future__ import annotations

import attrs
import numpy as np
from jaxtyping import Bool, Float32

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Reduction
from dovetail_algorithms.losses.selection import (
    largest,
    ordered_keys,
    share_of,
    token_hashes,
)

PREPARES = frozenset({"advantages", "old_log_probs", "response_mask", "sample_id"})
"""Columns that `covariances` and the selections read."""


@attrs.frozen(kw_only=True, eq=False)
class Covariances:
    """The covariance of advantage and log-probability at each of a mini-batch's tokens on one rank.

    Attributes:
        values_T: covariances (A − mean A)(log π_old − mean log π_old), float32 [T], with means over the tokens of all ranks.
        mask: the token mask, bool, ragged [T]; masked tokens have value 0, which is unused.
        tokens: the number of tokens with mask True over all ranks.
        sample_ids: the unique ids of the N samples, from which the hashes of tokens are computed.
        seed: the run's seed.
    """

    values_T: Float32[np.ndarray, "T"]
    mask: Ragged
    tokens: int
    sample_ids: list[str]
    seed: int

    def highest(self, share: float, reduction: Reduction) -> Ragged:
        """Return a mask of the tokens with the highest covariance, `share` of all tokens: float32, ragged [T], 1 on these tokens, else 0.

        Equal covariances are ranked by a hash of sample and position.
        """
        keys_T = ordered_keys(self.values_T, token_hashes(self.sample_ids, self.mask, self.seed))
        return self._column(largest(keys_T, self._kept_T, share_of(self.tokens, share), reduction))

    def random_between(self, low: float, high: float, share: float, reduction: Reduction) -> Ragged:
        """Return a mask of random tokens with a covariance in (low, high): float32, ragged [T], 1 on these tokens, else 0.

        Selects `share` of all tokens, or fewer if fewer qualify, by a hash of sample and position.
        """
        between_T = self._kept_T & (self.values_T > low) & (self.values_T < high)
        keys_T = token_hashes(self.sample_ids, self.mask, self.seed)
        return self._column(largest(keys_T, between_T, share_of(self.tokens, share), reduction))

    @property
    def _kept_T(self) -> Bool[np.ndarray, "T"]:
        return self.mask.values.astype(bool, copy=False)

    def _column(self, chosen_T: Bool[np.ndarray, "T"]) -> Ragged:
        return self.mask.with_values(chosen_T.astype(np.float32))


def covariances(mini_batch: Batch, reduction: Reduction, who: str, seed: int) -> Covariances:
    """Return the covariance of advantage and log-probability at each of this rank's tokens, for Clip-Cov and KL-Cov.

    Args:
        mini_batch: this rank's samples of the mini-batch, with the columns `advantages` ([N] or ragged [T]), `old_log_probs`,
            `response_mask` and `sample_id`.
        reduction: computes sums over the ranks that hold the mini-batch's other samples.
        who: the name of the loss, for the error.
        seed: the run's seed.

    Raises:
        ColumnError: a column is missing.
    """
    mini_batch.require(sorted(PREPARES), who)
    mask = mini_batch["response_mask"]
    kept_T = mask.values.astype(bool, copy=False)
    advantages = mini_batch["advantages"]
    if not isinstance(advantages, Ragged):
        advantages = mask.with_values(np.repeat(advantages, mask.lengths))
    advantages_T = np.where(kept_T, advantages.values, np.float32(0))
    log_probs_T = np.where(kept_T, mini_batch["old_log_probs"].values, np.float32(0))
    sums = reduction.sum(
        np.array(
            [
                np.count_nonzero(kept_T),
                advantages_T.sum(dtype=np.float64),
                log_probs_T.sum(dtype=np.float64),
            ]
        )
    )
    # The last digits of a float64 sum depend on the order of addition. Rounding the means to float32 removes these digits.
    advantage, log_prob = (sums[1:] / max(sums[0], 1)).astype(np.float32)
    values_T = (advantages_T - advantage) * (log_probs_T - log_prob)
    return Covariances(
        values_T=np.where(kept_T, values_T, np.float32(0)),
        mask=mask,
        tokens=int(sums[0]),
        sample_ids=mini_batch["sample_id"],
        seed=seed,
    )
