"""PolicyLoss and LossAggregation: the per-token loss, and how tokens become one number."""

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
    """The response tokens of some whole samples, packed end to end. T tokens, N samples.

    Masked tokens hold 0 in `log_probs_T` and in every column, so that a loss rarely needs to look at the mask.

    Attributes:
        log_probs_T: float32 [T], nats, of the policy being trained; carries the gradient.
        mask_T: bool [T], True on tokens that the policy produced.
        offsets_N1: int64 [N + 1], where each sample begins.
        columns: every other column that the loss declares in `requires`, float32 [T] each, or [T, …]
            where its values have a shape (a sample-level column is repeated over its tokens), such as `advantages`, `old_log_probs`,
            and what its `prepare` has made. `entropies` are those of the policy being trained, with gradient.
    """

    log_probs_T: Float[Tensor, "T"]
    mask_T: Bool[Tensor, "T"]
    offsets_N1: Int64[Tensor, "N1"]
    columns: Mapping[str, Float[Tensor, "T"]]

    @property
    def sample_T(self) -> Int64[Tensor, "T"]:
        """int64 [T]: which sample each token belongs to."""
        lengths_N = self.offsets_N1.diff()
        index_N = lengths_N.new_ones(lengths_N.shape).cumsum(0) - 1
        return index_N.repeat_interleave(lengths_N, output_size=self.log_probs_T.shape[0])


@attrs.frozen(kw_only=True, eq=False)
class TokenLosses:
    """Losses, float32 [T] (masked ones are ignored), and metrics that merge over micro-batches and ranks."""

    losses_T: Float[Tensor, "T"]
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)


class PolicyLoss(ColumnPlugin):
    """A loss for every token. It sees whole samples, so that sequence-level ratios are exact."""

    aggregation: ClassVar[str | None] = None
    """The loss aggregation that the paper prescribes, where it prescribes one."""

    @classmethod
    def prepares(cls, config: PluginConfig) -> frozenset[str]:
        """Return the columns that `prepare` reads. They must exist before the update: requiring `old_log_probs` causes a separate pass for
        them, even where one update follows a rollout.
        """
        return frozenset()

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, Ragged]:
        """Return columns computed over the whole mini-batch, before it is cut into micro-batches.

        Args:
            mini_batch: this rank's part, with what `requires` and `prepares` name, and `sample_id`.
            reduction: sums over the ranks that hold the other parts.

        Returns:
            Ragged columns over the T response tokens, values [T], found again in `LossInputs.columns` as float32.
        """
        return {}

    @abstractmethod
    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return the loss of each token, before aggregation."""


class LossAggregation(Plugin):
    """Turns token losses into one number that no micro-batching can change.

    The denominator is computed over the whole mini-batch first; every micro-batch then returns a sum.
    """

    constant: ClassVar[bool] = False
    """Whether the denominator is the same for any samples, so that the ranks' denominators are not added up."""

    @abstractmethod
    def denominator(self, response_mask: Ragged) -> float:
        """Return the denominator of the mini-batch's sum; denominators of disjoint sets of samples add up, unless constant.

        Args:
            response_mask: bool, ragged [T], of this rank's samples; True on the tokens that count.
        """

    @abstractmethod
    def total(
        self,
        losses_T: Float[Tensor, "T"],
        mask_T: Bool[Tensor, "T"],
        offsets_N1: Int64[Tensor, "N1"],
    ) -> Float[Tensor, ""]:
        """Return float32 []: the sum over these samples, not yet divided by the denominator."""
