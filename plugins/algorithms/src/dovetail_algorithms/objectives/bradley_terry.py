"""BradleyTerry: what a reward model minimises, the Bradley–Terry loss of preference pairs.

    L = 1/P Σ_p softplus(−(r_w − r_l))

(Bradley and Terry, 1952; arXiv 2203.02155, equation 1) where r_w is the score of a pair's chosen response, r_l that of its
rejected one. Legend: N = 2P samples, P pairs, T response tokens, packed end to end.
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
from dovetail.numerics import all_finite, loss_share, mean_metric, on_device, pair_rows
from dovetail_algorithms.config.objectives import BradleyTerryConfig


class BradleyTerry(Objective):
    """−log σ of how much higher the chosen response is scored than the rejected one."""

    name = "bradley_terry"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = BradleyTerryConfig
    unit = "pair"

    @classmethod
    def outputs(cls, config: BradleyTerryConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["values"],)

    @classmethod
    def requires(cls, config: BradleyTerryConfig) -> frozenset[str]:
        """`chosen`, and `response_mask` with one token a sample: the one whose value is the score."""
        return frozenset({"chosen", "response_mask"})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """As in `Objective`.

        Raises:
            ColumnError: a pair has not one chosen and one rejected response, or a sample not exactly one token with mask 1.
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
        """As in `Objective`. Metrics: `reward_model/loss`, `reward_model/accuracy` (share of pairs whose chosen response
        has the higher score) and `reward_model/margin` (mean of r_w − r_l).
        """
        values_T = outputs["values"]
        places_N = np.flatnonzero(micro_batch["response_mask"].values)
        chosen_P, rejected_P = (
            values_T[on_device(places_N[rows_P], values_T)] for rows_P in pair_rows(micro_batch)
        )
        margins_P = chosen_P - rejected_P
        pairs = denominators["pairs"] or 1.0
        loss = torch.nn.functional.softplus(-margins_P).sum() / pairs
        every_P = torch.ones_like(margins_P, dtype=torch.bool)
        metrics: dict[str, Metric] = {
            "reward_model/loss": loss_share(loss, len(margins_P) / pairs),
            "reward_model/accuracy": mean_metric(margins_P.detach() > 0, every_P),
            "reward_model/margin": mean_metric(margins_P, every_P),
        }
        return ObjectiveTerm(
            loss=loss, metrics=metrics, finite=all_finite(loss, {"values": margins_P})
        )


def preference_scores(values: Ragged, mask: Ragged) -> Float[np.ndarray, "N"]:
    """float32 [N]: each response's score, its value at its one token with mask 1.

    Args:
        values: float32, over response tokens, as an engine's forward pass gives it.
        mask: `response_mask`.

    Raises:
        ColumnError: a sample has not exactly one token with mask 1.
    """
    _check_one_token(mask)
    scores_N: np.ndarray = values.values[np.flatnonzero(mask.values)].astype(np.float32)
    return scores_N


def _check_one_token(mask: Ragged) -> None:
    counts_N = np.bincount(mask.row_index, weights=mask.values, minlength=len(mask))
    odd = np.flatnonzero(counts_N != 1)
    if len(odd):
        raise ColumnError(
            f"sample {int(odd[0])} has {int(counts_N[odd[0]])} tokens in response_mask, and a reward model scores one",
            hint="set response_mask to 1 at the token whose value is the score, and to 0 elsewhere",
        )
