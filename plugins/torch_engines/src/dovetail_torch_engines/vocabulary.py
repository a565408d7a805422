"""An output layer whose vocabulary is divided among ranks: each rank's shard, and scores over the whole vocabulary from the shards' scores.

Legend: R scored tokens, K token ids for each.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class Vocabulary:
    """One rank's shard of the vocabulary."""

    first: int
    """The first token id of the shard."""
    size: int
    """Number of the model's tokens in the shard; further rows of the weight are padding."""
    group: dist.ProcessGroup | None
    """The ranks that divide the vocabulary; None for a single rank."""

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Convert token ids (int64, any shape) to positions in this shard (int64, 0 for ids outside), and return which ids are
        inside (bool).
        """
        place = targets - self.first
        mine = (place >= 0) & (place < self.size)
        return place.masked_fill(~mine, 0), mine

    def maximum(self, values: Tensor) -> Tensor:
        """Compute the elementwise maximum over ranks, in place; any shape, the same on all ranks. Collective."""
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        """Compute the elementwise sum over ranks, in place; any shape, the same on all ranks. Collective."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def gathered(self, values: Tensor) -> Tensor:
        """Gather every rank's values [...] as [ranks, …], in the order of ranks; the shape is the same on all ranks. Collective."""
        if self.group is None:
            return values[None]
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)

    def top_of_part(self, z_RV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of this shard of the vocabulary, and their logits.

        Args:
            z_RV: float [R, V], this shard's logits in any scale.
            top_k: K, the number of tokens to return.

        Returns:
            int32 [R, K], token ids in the whole vocabulary, the likeliest first; and float32 [R, K], their logits. Padded with −1
            and −∞ if the shard has fewer than K.
        """
        z_RK, place_RK = z_RV.topk(min(top_k, z_RV.shape[1]), dim=-1)
        missing = (0, top_k - z_RK.shape[1])
        pad = torch.nn.functional.pad
        ids_RK = pad((place_RK + self.first).int(), missing, value=-1)
        return ids_RK, pad(z_RK.float(), missing, value=-torch.inf)

    def merged_top(self, ids_RK: Tensor, z_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of the whole vocabulary, and their logits, from those of each shard. Collective.

        Args:
            ids_RK: int32 [R, K], as `top_of_part` returns them.
            z_RK: float32 [R, K], their logits.

        Returns:
            int32 [R, K] and float32 [R, K], of the whole vocabulary, the same on every rank.
        """
        if self.group is None:
            return ids_RK, z_RK
        ids_RX, z_RX = (self.gathered(x).transpose(0, 1).flatten(1) for x in (ids_RK, z_RK))
        z_RK, place_RK = z_RX.topk(ids_RK.shape[1], dim=-1)
        return ids_RX.gather(-1, place_RK), z_RK

    def merged(self, scores_4R: Tensor, mine_R: Tensor) -> Tensor:
        """Convert scores under the softmax over each shard to scores under the softmax over the whole vocabulary. Collective.

        With logits z, probabilities p, entropy H and lse = log Σ e^z of a shard, the same symbols with a prime for the whole vocabulary,
        and w = e^(lse − lse'), which adds up to 1 over shards:

            log p'_y = z_y − lse'        H' = Σ w (H + lse' − lse)        Σ p'² = Σ w² Σ p²

        Args:
            scores_4R: float32 [4, R]: log-probabilities, entropies, Σ p² and lse of this shard.
            mine_R: bool [R], whether this shard has the target.

        Returns:
            float32 [4, R], the same scores over the whole vocabulary, equal on every rank.
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
