"""BradleyTerry: the objective of a reward model, the Bradley–Terry loss of preference pairs.

    L = 1/P Σ_p −log σ(r_w − r_l − m) + c (r_w + r_l)²

(Bradley and Terry, 1952; arXiv 2203.02155, equation 1) where r_w is the score of a pair's chosen response, r_l the score of its
rejected response. m is the pair's margin (arXiv 2307.09288, equation 2), or 0. The second term, with weight c, pulls the mean score to
0, since the first term depends only on differences (arXiv 2312.09244, equation 2). Legend: N = 2P samples, P pairs,
T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
from dovetail_algorithms.config.objectives import BradleyTerryConfig
from dovetail_algorithms.objectives.preference import share_preferred
from dovetail_stages import all_finite, loss_share, mean_metric, on_device, pair_rows


class BradleyTerry(Objective):
    """L = −log σ(r_w − r_l − m) + c (r_w + r_l)², with r_w and r_l the scores of the chosen and the rejected response, m the margin, and
    c `center_coef`.
    """

    name = "bradley_terry"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = BradleyTerryConfig
    config: BradleyTerryConfig
    unit = "pair"
    key_figures = {"loss": "down", "accuracy": "up", "margin": "up"}  # noqa: RUF012
    trained_at = "end"

    @classmethod
    def outputs(cls, config: BradleyTerryConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["values"],)

    @classmethod
    def requires(cls, config: BradleyTerryConfig) -> frozenset[str]:
        """Return `chosen`, `response_mask` (1 on the one token whose value is the score), and `margin` if the config asks for it."""
        columns = frozenset({"chosen", "response_mask"})
        return columns | {"margin"} if config.margin else columns

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """Check the mini-batch and return it unchanged.

        Raises:
            ColumnError: a pair does not have one chosen and one rejected response, or a sample not exactly one token with mask 1.
        """
        pair_rows(mini_batch)
        _check_one_token(mini_batch["response_mask"])
        return mini_batch

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        return {"pairs": float(reduction.sum(np.array([len(mini_batch) / 2], np.float64))[0])}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Compute the loss term (see `Objective.term`). Metrics: `actor/loss`; `actor/accuracy`, the share of pairs whose chosen response
        has the higher score, with ties as half; `actor/margin`, the mean score difference r_w − r_l of chosen and rejected;
        `actor/brier`, the mean of (1 − σ(r_w − r_l))², which is smallest if σ is the share of people who prefer the chosen response
        (Brier, 1950); and `actor/score`, the mean of all scores.
        """
        values_T = outputs["values"]
        places_N = np.flatnonzero(micro_batch["response_mask"].values)
        rows = pair_rows(micro_batch)
        chosen_P, rejected_P = (values_T[on_device(places_N[rows_P], values_T)] for rows_P in rows)
        margins_P = chosen_P - rejected_P
        wanted_P = torch.zeros_like(margins_P)
        if self.config.margin:
            wanted_P = on_device(micro_batch["margin"][rows[0]], values_T).to(values_T.dtype)
        pairs = denominators["pairs"] or 1.0
        losses_P = torch.nn.functional.softplus(wanted_P - margins_P)
        if self.config.center_coef:
            losses_P = losses_P + self.config.center_coef * (chosen_P + rejected_P) ** 2
        loss = losses_P.sum() / pairs
        every_P = torch.ones_like(margins_P, dtype=torch.bool)
        metrics: dict[str, Metric] = {
            "actor/loss": loss_share(loss, len(margins_P) / pairs),
            "actor/accuracy": mean_metric(share_preferred(margins_P), every_P),
            "actor/margin": mean_metric(margins_P, every_P),
            "actor/brier": mean_metric(torch.sigmoid(-margins_P) ** 2, every_P),
            "actor/score": mean_metric((chosen_P + rejected_P) / 2, every_P),
        }
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"values": margins_P})
        )


def _check_one_token(mask: Ragged) -> None:
    counts_N = np.bincount(mask.row_index, weights=mask.values, minlength=len(mask))
    odd = np.flatnonzero(counts_N != 1)
    if len(odd):
        raise ColumnError(
            f"response_mask of sample {int(odd[0])} selects {int(counts_N[odd[0]])} token(s); expected one, whose value is the reward model's score",
            hint="set response_mask to 1 at the token whose value is the score, and to 0 elsewhere",
        )
