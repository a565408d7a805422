"""BradleyTerry: what a reward model minimises, the Bradley–Terry loss of preference pairs.

    L = 1/P Σ_p softplus(−(r_w − r_l))

(Bradley and Terry, 1952; arXiv 2203.02155, equation 1) where r_w is the score of a pair's chosen response, r_l that of its
rejected one. One optimizer step is taken at one point: with the scores r° of that point, each response gives

    ℓ_i = softplus(−s_i (r_i − r°_other(i))),  s = 1 for the chosen, −1 for the rejected one,

and Σ_i ℓ_i / P has the gradient of L exactly, while no micro-batch needs both of a pair.
Legend: N = 2P samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dovetail.batch import Batch, Column, Ragged
from dovetail.errors import ColumnError
from dovetail.interfaces import (
    OUTPUTS,
    Objective,
    ObjectiveTerm,
    OutputSpec,
    Reduction,
)
from dovetail.metrics import Metric
from dovetail.numerics import all_finite, loss_share, mean_metric, metric_weight, on_device
from dovetail_algorithms.config.objectives import BradleyTerryConfig


class BradleyTerry(Objective):
    """−log σ of how much higher the chosen response is scored than the rejected one."""

    name = "bradley_terry"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = BradleyTerryConfig
    columns = (
        Column(
            "other_scores",
            "float32",
            "dense",
            "score of its pair's other response, under the weights that the update starts from",
            "with_other_scores",
        ),
    )

    @classmethod
    def outputs(cls, config: BradleyTerryConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["values"],)

    @classmethod
    def requires(cls, config: BradleyTerryConfig) -> frozenset[str]:
        """`chosen`, `other_scores` (see `with_other_scores`), and `response_mask` with one token a sample."""
        return frozenset({"chosen", "other_scores", "response_mask"})

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """As in `Objective`.

        Raises:
            ColumnError: a sample has not exactly one token with mask 1.
        """
        _check_one_token(mini_batch["response_mask"])
        return mini_batch

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        # One token a sample has a value: this is the number of samples.
        tokens = np.count_nonzero(mini_batch["response_mask"].values)
        loss, samples = reduction.sum(np.array([tokens, len(mini_batch)], np.float64)).tolist()
        return {"loss": loss, "samples": samples}

    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T"]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """As in `Objective`. Metrics: `reward_model/loss`, `reward_model/accuracy` (share of responses on the right side
        of the other one) and `reward_model/margin` (mean of s_i (r_i − r°_other)).
        """
        mask: Ragged = micro_batch["response_mask"]
        values_T = outputs["values"]
        places_N = on_device(np.flatnonzero(mask.values), values_T)
        scores_N = values_T[places_N]
        others_N = on_device(micro_batch["other_scores"], values_T).to(scores_N.dtype)
        chosen_N = on_device(micro_batch["chosen"].astype(np.bool_), values_T)
        margins_N = torch.where(chosen_N, scores_N - others_N, others_N - scores_N)
        loss = torch.nn.functional.softplus(-margins_N).sum() / (denominators["loss"] or 1.0)
        everyone_N = torch.ones_like(chosen_N)
        metrics: dict[str, Metric] = {
            "reward_model/loss": loss_share(loss, metric_weight(micro_batch, denominators)),
            "reward_model/accuracy": mean_metric(margins_N.detach() > 0, everyone_N),
            "reward_model/margin": mean_metric(margins_N, everyone_N),
        }
        # each pair's loss stands here twice, with one of its two derivatives in either place: over N it is a half of each
        return ObjectiveTerm(
            loss=2.0 * loss, metrics=metrics, finite=all_finite(loss, {"values": scores_N})
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


def with_other_scores(batch: Batch, scores_N: Float[np.ndarray, "N"]) -> Batch:
    """The batch with the column `other_scores`, float32 [N]: the score of the other response of each pair.

    Args:
        batch: pairs are neighbours, in either order; needs `chosen`.
        scores_N: of the samples, under the weights that the update starts from.

    Raises:
        ColumnError: neighbours are not one chosen and one rejected response.
    """
    chosen_N = np.asarray(batch["chosen"], np.bool_)
    if len(batch) % 2 or not np.array_equal(chosen_N[::2], ~chosen_N[1::2]):
        raise ColumnError(
            f"the {len(batch)} samples are not pairs of neighbours with one chosen each",
            hint="order the batch as chosen, rejected, chosen, rejected, …",
        )
    swapped_N = np.asarray(scores_N, np.float32).reshape(-1, 2)[:, ::-1].reshape(-1)
    return batch.with_columns({"other_scores": np.ascontiguousarray(swapped_N)})


def _check_one_token(mask: Ragged) -> None:
    counts_N = np.bincount(mask.row_index, weights=mask.values, minlength=len(mask))
    odd = np.flatnonzero(counts_N != 1)
    if len(odd):
        raise ColumnError(
            f"sample {int(odd[0])} has {int(counts_N[odd[0]])} tokens in response_mask, and a reward model scores one",
            hint="set response_mask to 1 at the token whose value is the score, and to 0 elsewhere",
        )
