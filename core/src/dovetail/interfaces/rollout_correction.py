"""RolloutCorrection: compensates for a rollout policy that differs from the training policy.

Inference engine and trainer compute with different precision and kernels, and the weights may have changed since the
rollout. With r_t = π_train(t) / π_rollout(t), a correction weighs tokens by r (importance sampling) or leaves
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
    """The response tokens of N whole samples, packed end to end: T tokens.

    Attributes:
        train_log_probs_T: float32 [T], nats, under the trainer's weights. If the correction is computed within an update:
            the current weights, without gradient. If the correction is computed before the update (mode `decoupled`): the weights
            before the update, which are the old policy's.
        rollout_log_probs_T: float32 [T], nats, of the sampler as used.
        mask_T: bool [T], True on tokens that the policy produced and that are trained on; other tokens may have any
            log-probabilities.
        offsets_N1: int64 [N + 1], the offset of each sample's first token, then T.
    """

    train_log_probs_T: Float[Tensor, "T"]
    rollout_log_probs_T: Float[Tensor, "T"]
    mask_T: Bool[Tensor, "T"]
    offsets_N1: Int64[Tensor, "N1"]


@attrs.frozen(kw_only=True, eq=False)
class Correction:
    """The result of a rollout correction.

    Attributes:
        weights_T: float32 [T] without gradient, a factor on each token's loss; None if no token is weighted. NaN on a
            kept token whose ratio is not finite, so that the update stops.
        keep_T: bool [T], True on tokens of `mask_T` that keep their loss; None if no token is rejected.
        metrics: the metrics `rollout_corr/…`, which merge over micro-batches and ranks.
    """

    weights_T: Float[Tensor, "T"] | None = None
    keep_T: Bool[Tensor, "T"] | None = None
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)


class RolloutCorrection(ColumnPlugin):
    """Weights or rejects tokens by the ratio of the training policy to the rollout policy."""

    @classmethod
    @abstractmethod
    def mode(cls, config: PluginConfig) -> CorrectionMode:
        """Return `bypass` if the rollout policy serves as PPO's old policy, `decoupled` if not, `disabled` if nothing is corrected."""

    @classmethod
    def before_update(cls, config: PluginConfig) -> bool:
        """Return whether the correction needs the whole batch before the first update.

        Rejecting tokens in the mode `decoupled` needs the whole batch, because it changes the losses' denominators. Normalising weights
        needs the whole batch too.
        """
        return False

    @abstractmethod
    def correct(self, inputs: CorrectionInputs, reduction: Reduction) -> Correction:
        """Compute weights and rejections for whole samples, of the batch or of a micro-batch.

        Args:
            inputs: the log-probabilities of the samples.
            reduction: the sum over the ranks that share the batch.
        """
