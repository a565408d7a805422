"""An output layer whose vocabulary is divided among ranks: each rank's part, and scores of the whole from those of the parts.

Legend: R scored tokens.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """One rank's part of the vocabulary."""

    first: int
    """Its first token."""
    size: int
    """How many tokens of the model's own it has; rows of the weight after these are padding."""
    group: dist.ProcessGroup | None
    """The ranks that have the other parts; None: there are none."""

    def places(self, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """Where targets, int64 [R] of the whole vocabulary, lie in this part, int64 [R], and whether they do, bool [R]; elsewhere 0."""
        place_R = targets_R - self.first
        mine_R = (place_R >= 0) & (place_R < self.size)
        return place_R.masked_fill(~mine_R, 0), mine_R

    def maximum(self, values: Tensor) -> Tensor:
        """The largest over ranks, element by element and in place; of any shape, the same on all ranks. Collective."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, element by element and in place; of any shape, the same on all ranks. Collective."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def merged(self, scores_4R: Tensor, mine_R: Tensor) -> Tensor:
        """Scores under the softmax over the whole vocabulary, from those under the softmax over each part. Collective.

        With the part's z, p, H and log Σ e^z = lse, the whole's lse', and w = e^(lse − lse'), which adds up to 1 over parts:

            log p'_y = z_y − lse'        H' = Σ w (H + lse' − lse)        Σ p'² = Σ w² Σ p²

        Args:
            scores_4R: float32 [4, R]: log-probabilities, entropies, Σ p² and lse of this part.
            mine_R: bool [R], whether this part has the target.

        Returns:
            float32 [4, R], the same of the whole, and the same on every rank.
        """
        if self.group is None:
            return scores_4R
        log_probs_R, entropies_R, squares_R, lse_R = scores_4R.unbind()
        largest_R = self.maximum(lse_R.clone())
        away_R = lse_R - largest_R
        part_R = away_R.exp()
        chosen_R = torch.where(mine_R, log_probs_R + lse_R, 0)
        sums = (part_R, chosen_R, part_R * (entropies_R - away_R), part_R.square() * squares_R)
        sum_R, chosen_R, weighted_R, squares_R = self.total(torch.stack(sums)).unbind()
        log_R = sum_R.log()
        lse_R = largest_R + log_R
        return torch.stack(
            [chosen_R - lse_R, log_R + weighted_R / sum_R, squares_R / sum_R.square(), lse_R]
        )
