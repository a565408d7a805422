"""PolicyLoss and LossAggregation: the loss of each token, and the reduction of token losses to one number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from dovetail.interfaces.plugin import ColumnPlugin, Plugin, PluginConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from dovetail.batch.batch import Batch
    from dovetail.batch.ragged import Ragged
    from dovetail.interfaces.plugin import Reduction
    from dovetail.metrics import Metric


@attrs.frozen(kw_only=True, eq=False)
class LossInputs:
    """The response tokens of N whole samples, packed end to end: T tokens.

    Masked tokens hold 0 in `log_probs_T` and in every column, so that a loss rarely needs to look at the mask.

    Attributes:
        log_probs_T: float32 [T], nats, of the policy being trained; carries the gradient.
        mask_T: bool [T], True on tokens that the policy produced.
        offsets_N1: int64 [N + 1], the offset of each sample's first token, then T.
        columns: the other columns that `requires` names, such as `advantages` and `old_log_probs`, and those that `prepare`
            returned. float32 [T] each, or [T, …] if a value has a shape; a sample-level column is repeated over the sample's
            tokens. `entropies` are the trained policy's, with gradient.
    """

    log_probs_T: Float[Tensor, "T"]
    mask_T: Bool[Tensor, "T"]
    offsets_N1: Int64[Tensor, "N1"]
    columns: Mapping[str, Float[Tensor, "T"]]

    @property
    def sample_T(self) -> Int64[Tensor, "T"]:
        """int64 [T]: index of each token's sample."""
        lengths_N = self.offsets_N1.diff()
        index_N = lengths_N.new_ones(lengths_N.shape).cumsum(0) - 1
        return index_N.repeat_interleave(lengths_N, output_size=self.log_probs_T.shape[0])


@attrs.frozen(kw_only=True, eq=False)
class TokenLosses:
    """Losses of tokens, float32 [T], ignored on masked tokens; and metrics that merge over micro-batches and ranks."""

    losses_T: Float[Tensor, "T"]
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)


class PolicyLoss(ColumnPlugin):
    """A loss for every response token. The inputs are whole samples, so that sequence-level ratios are exact."""

    aggregation: ClassVar[str | None] = None
    """The loss aggregation that the loss's paper prescribes; None if it prescribes none."""

    @classmethod
    def prepares(cls, config: PluginConfig) -> frozenset[str]:
        """Return the columns that `prepare` reads, which must exist before the update.

        If `old_log_probs` is among these columns, a separate forward pass computes it, even if only one update follows a rollout.
        """
        return frozenset()

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, Ragged]:
        """Return columns computed over the whole mini-batch, before the split into micro-batches.

        Args:
            mini_batch: this rank's part, with `sample_id` and the columns that `requires` and `prepares` name.
            reduction: the sum over the ranks that share the mini-batch.

        Returns:
            Ragged columns over the T response tokens, values [T]. `LossInputs.columns` holds them as float32.
        """
        return {}

    @abstractmethod
    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return the loss of each token, before aggregation."""


class LossAggregation(Plugin):
    """Turns token losses into one number, which does not depend on the split into micro-batches.

    The denominator is computed over the whole mini-batch first; every micro-batch then returns a sum.
    """

    constant: ClassVar[bool] = False
    """Whether the denominator is the same for any samples, so that the ranks' denominators are not added up."""

    @abstractmethod
    def denominator(self, response_mask: Ragged) -> float:
        """Return the denominator of the mini-batch's sum. Unless `constant`, denominators of disjoint sets of samples add up.

        Args:
            response_mask: the mask of this rank's samples, bool, ragged [T]; True on the tokens that count.
        """

    @abstractmethod
    def total(
        self,
        losses_T: Float[Tensor, "T"],
        mask_T: Bool[Tensor, "T"],
        offsets_N1: Int64[Tensor, "N1"],
    ) -> Float[Tensor, ""]:
        """Return the sum of these samples' losses, float32 [], not yet divided by the denominator."""
