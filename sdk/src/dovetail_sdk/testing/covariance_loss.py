"""A policy loss that reads the whole mini-batch first, as losses do that choose tokens by their covariance.

The loss is in a file of its own, so that a test can select it by path: `{path: …, attribute: CovarianceLoss}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dovetail.interfaces import LossInputs, PluginConfig, PolicyLoss, TokenLosses

if TYPE_CHECKING:
    from dovetail.batch import Batch, Ragged
    from dovetail.interfaces import Reduction


class CovarianceLoss(PolicyLoss):
    """Policy-gradient loss with an entropy bonus, without tokens whose advantage and log-probability covary positively.

    With advantage A, entropy H and l = log π_old, the loss of a token is −(A log π + H / 100). The loss is 0 for tokens with
    (A − Ā)(l − l̄) > 0, where Ā and l̄ are means over the mini-batch.
    """

    name = "covariance"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages", "entropies"})

    @classmethod
    def prepares(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages", "old_log_probs"})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, Ragged]:
        """Return `kept`: float32, ragged [T], 1 on tokens that keep their loss, 0 on other tokens."""
        mask: Ragged = mini_batch["response_mask"]
        mask_T = mask.values.astype(np.float64)
        advantages_T = np.repeat(mini_batch["advantages"], mask.lengths).astype(np.float64)
        old_T = mini_batch["old_log_probs"].values.astype(np.float64)
        sums = [mask_T.sum(), (advantages_T * mask_T).sum(), (old_T * mask_T).sum()]
        tokens, advantages, old = reduction.sum(np.array(sums))
        count = max(tokens, 1.0)
        covariance_T = (advantages_T - advantages / count) * (old_T - old / count)
        return {"kept": mask.with_values((covariance_T <= 0).astype(np.float32))}

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Return the loss of each token, [T]."""
        columns = inputs.columns
        gain_T = columns["advantages"] * inputs.log_probs_T + columns["entropies"] / 100
        return TokenLosses(losses_T=-gain_T * columns["kept"])
