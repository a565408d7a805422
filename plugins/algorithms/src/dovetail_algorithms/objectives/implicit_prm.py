"""ImplicitPrm: what an implicit process reward model minimises, the cross-entropy of outcomes (PRIME, arXiv 2502.01456).

    L = −1/N Σ_i [ o_i log σ(r_i) + (1 − o_i) log(1 − σ(r_i)) ],   r_i = β Σ_t m_t log(π_φ(y_t | x, y_<t) / π_ref(y_t | x, y_<t))

(the reward's form is that of arXiv 2412.01981) where o_i in [0, 1] is the outcome of sample i and m the response mask. Its parts are rewards of single tokens.
Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    ObjectiveTerm,
    OutputSpec,
    Reduction,
)
from dovetail.metrics import Metric
from dovetail.numerics import (
    all_finite,
    loss_share,
    mean_metric,
    on_device,
    sum_by_sample,
    token_column,
)
from dovetail_algorithms.config.objectives import ImplicitPrmConfig
from dovetail_algorithms.stages.implicit_process_rewards import REFERENCE


class ImplicitPrm(Objective):
    """Makes the sum of a response's log-ratios tell whether it is right. Samples without a token of the policy count for nothing."""

    name = "implicit_prm"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ImplicitPrmConfig

    @classmethod
    def outputs(cls, config: ImplicitPrmConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    @classmethod
    def requires(cls, config: ImplicitPrmConfig) -> frozenset[str]:
        """`response_mask`, `scores` in [0, 1], and `prm_ref_log_probs`."""
        return frozenset({"response_mask", "scores", REFERENCE})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """As in `Objective`.

        Raises:
            ColumnError: a score is not in [0, 1].
        """
        scores_N = mini_batch["scores"]
        wrong = np.flatnonzero((scores_N < 0) | (scores_N > 1))
        if len(wrong):
            raise ColumnError(
                f"sample {int(wrong[0])} has the score {float(scores_N[wrong[0]]):g}, and objective 'implicit_prm' takes scores as "
                "outcomes from 0 (wrong) to 1 (right)",
                hint="choose a reward of 0 and 1, and leave out penalties that change it (algorithm.kl.in_reward, algorithm.overlong_penalty)",
            )
        return mini_batch

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        own = np.array([(mini_batch["response_mask"].sum() > 0).sum()], np.float64)
        return {"samples": float(reduction.sum(own)[0])}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """As in `Objective`. Metrics, which take the role's name: `prm/loss`, and `prm/accuracy`, the share of samples whose reward is above 0
        where the outcome is above ½ and below where not.
        """
        mask: Ragged = micro_batch["response_mask"]
        mask_T = on_device(mask.values, outputs["log_probs"]).bool()
        log_probs_T = outputs["log_probs"].masked_fill(~mask_T, 0)
        reference_T = token_column(micro_batch, REFERENCE, mask, mask_T, log_probs_T)
        offsets_N1 = on_device(mask.offsets, log_probs_T)
        rewards_N = self.config.beta * sum_by_sample(log_probs_T - reference_T, offsets_N1)
        outcomes_N = on_device(micro_batch["scores"], rewards_N).to(rewards_N.dtype)
        there_N = on_device(mask.sum() > 0, rewards_N)
        losses_N = binary_cross_entropy_with_logits(rewards_N, outcomes_N, reduction="none")
        samples = denominators["samples"] or 1.0
        loss = losses_N.masked_fill(~there_N, 0).sum() / samples
        agrees_N = (rewards_N.detach() > 0) == (outcomes_N > 0.5)
        metrics: dict[str, Metric] = {
            "prm/loss": loss_share(loss, int(there_N.sum()) / samples),
            "prm/accuracy": mean_metric(agrees_N, there_N),
        }
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"log_probs": log_probs_T})
        )
