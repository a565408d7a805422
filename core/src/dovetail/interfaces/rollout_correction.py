"""RolloutCorrection: what makes up for a rollout policy that is not the training policy.

Inference engine and trainer compute the same weights differently, in precision and in kernels, and weights may have
moved since. With r_t = π_train(t) / π_rollout(t), a correction weighs tokens by r (importance sampling) or leaves
out those where r is too far from 1 (rejection). Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from dovetail.interfaces.plugin import ColumnPlugin, PluginConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from dovetail.interfaces.plugin import Reduction
    from dovetail.metrics import Metric


CorrectionMode = Literal["decoupled", "bypass", "disabled"]
"""`decoupled`: rollout, old and current policy are three policies. `bypass`: the rollout policy is the old one, which saves the old
policy's forward pass. `disabled`: nothing is corrected."""


@attrs.frozen(kw_only=True, eq=False)
class CorrectionInputs:
    """The response tokens of some whole samples, packed end to end.

    Attributes:
        train_log_probs_T: float32 [T], nats: old_log_probs (decoupled, before the update), or the current
            ones without gradient (within an update).
        rollout_log_probs_T: float32 [T], nats, of the sampler as used.
        mask_T: bool [T], True on tokens that the policy produced and that are trained on; where it is False, the
            log-probabilities may be anything.
        offsets_N1: int64 [N + 1], where each sample begins.
    """

    train_log_probs_T: Float[Tensor, "T"]
    rollout_log_probs_T: Float[Tensor, "T"]
    mask_T: Bool[Tensor, "T"]
    offsets_N1: Int64[Tensor, "N1"]


@attrs.frozen(kw_only=True, eq=False)
class Correction:
    """The result of a rollout correction.

    Attributes:
        weights_T: float32 [T] without gradient, a factor on each token's loss; None where nothing is weighted. NaN on a
            kept token whose ratio is not finite, so that the update stops.
        keep_T: bool [T], which of the masked-in tokens keep their loss; None where nothing is rejected.
        metrics: `rollout_corr/…`, which merge over micro-batches and ranks.
    """

    weights_T: Float[Tensor, "T"] | None = None
    keep_T: Bool[Tensor, "T"] | None = None
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)


class RolloutCorrection(ColumnPlugin):
    """Weights or rejects tokens by the difference of the two policies."""

    @classmethod
    @abstractmethod
    def mode(cls, config: PluginConfig) -> CorrectionMode:
        """Return how rollout, old and current policy relate under this config."""

    @classmethod
    def before_update(cls, config: PluginConfig) -> bool:
        """Return whether it needs the whole batch before the first update: rejection in decoupled mode changes the denominators of losses,
        and normalisation of weights uses all of them.
        """
        return False

    @abstractmethod
    def correct(self, inputs: CorrectionInputs, reduction: Reduction) -> Correction:
        """Correct whole samples: the whole batch, or those of a micro-batch.

        Args:
            inputs: the log-probabilities of the samples.
            reduction: sums over the ranks that hold the rest of the batch.
        """
