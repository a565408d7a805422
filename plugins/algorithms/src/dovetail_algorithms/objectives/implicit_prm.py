"""ImplicitPrm: the objective of an implicit process reward model, the cross-entropy of outcomes (PRIME, arXiv 2502.01456).

    L = −1/N Σ_i [ o_i log σ(r_i) + (1 − o_i) log(1 − σ(r_i)) ],   r_i = β Σ_t m_t log(π_φ(y_t | x, y_<t) / π_ref(y_t | x, y_<t))

where o_i in [0, 1] is the outcome of sample i, m the response mask, and r_i the reward of arXiv 2412.01981. The terms of r_i are rewards
of single tokens.
Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dovetail.batch import Batch
from dovetail.errors import ColumnError
from dovetail.interfaces import Reduction
from dovetail_algorithms.config.objectives import ImplicitPrmConfig
from dovetail_algorithms.objectives.responses import ResponseObjective
from dovetail_algorithms.stages.implicit_process_rewards import OUTCOMES, REFERENCE
from dovetail_stages import on_device


class ImplicitPrm(ResponseObjective):
    """Trains the sum of a response's log-ratios to predict whether the response is right. Samples without a policy token have no effect.

    Metrics, prefixed by the role's name: `prm/loss`; and `prm/accuracy`, the share of right predictions. A prediction is
    right if the summed log-ratio is above 0 and the score above ½, or neither is.
    """

    name = "implicit_prm"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ImplicitPrmConfig
    reference = REFERENCE
    prefix = "prm"

    @classmethod
    def requires(cls, config: ImplicitPrmConfig) -> frozenset[str]:
        """Return `response_mask`, `prm_outcomes` (the samples' scores, in [0, 1]), and `prm_ref_log_probs`."""
        return frozenset({"response_mask", OUTCOMES, REFERENCE})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """Check the mini-batch and return it unchanged.

        Raises:
            ColumnError: a score is not in [0, 1].
        """
        scores_N = mini_batch[OUTCOMES]
        wrong = np.flatnonzero((scores_N < 0) | (scores_N > 1))
        if len(wrong):
            raise ColumnError(
                f"sample {int(wrong[0])} has the score {float(scores_N[wrong[0]]):g}; objective 'implicit_prm' expects scores "
                "from 0 (wrong) to 1 (right)",
                hint="use a reward function that returns scores from 0 to 1",
            )
        return mini_batch

    def losses(
        self, log_ratios_N: Float[Tensor, "N"], micro_batch: Batch
    ) -> tuple[Float[Tensor, "N"], Mapping[str, Tensor]]:
        rewards_N = self.config.beta * log_ratios_N
        outcomes_N = on_device(micro_batch[OUTCOMES], rewards_N).to(rewards_N.dtype)
        losses_N = binary_cross_entropy_with_logits(rewards_N, outcomes_N, reduction="none")
        return losses_N, {"accuracy": (rewards_N.detach() > 0) == (outcomes_N > 0.5)}
