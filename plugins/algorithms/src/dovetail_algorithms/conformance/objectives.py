"""The suites of the objectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from dovetail.batch import Batch
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import BradleyTerryConfig, NllConfig, PolicyConfig
from dovetail_algorithms.objectives.bradley_terry import BradleyTerry
from dovetail_algorithms.objectives.nll import NegativeLogLikelihood
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_algorithms.objectives.value import ValueObjective
from dovetail_sdk.testing.conformance import ObjectiveConformance


class TestPolicy(ObjectiveConformance):
    """PPO's clipped loss with a KL penalty and an entropy bonus."""

    plugin = PolicyObjective
    config = PolicyConfig(name="policy", kl="k3", entropy=True)
    scalars: ClassVar[Mapping[str, float]] = {"kl_coef": 0.1, "entropy_coef": 0.01}


class TestPolicyOfReinforce(ObjectiveConformance):
    """REINFORCE on sequence sums."""

    plugin = PolicyObjective
    config = PolicyConfig(
        name="policy",
        policy_loss=PluginSection(name="reinforce"),
        loss_aggregation=PluginSection(name="seq_mean_token_sum"),
        kl="k2",
    )
    scalars: ClassVar[Mapping[str, float]] = {"kl_coef": 0.5}

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Σ (−A log π + c/2 (log π − log π_ref)²) over the number of sequences; outputs and gradients are [T] each."""
        mask = mini_batch["response_mask"]
        shown_T, sequences = mask.values, np.count_nonzero(mask.sum())
        advantages_T = mini_batch["advantages"].values.astype(np.float64)
        log_probs_T = outputs["log_probs"].astype(np.float64)
        away_T = log_probs_T - mini_batch["ref_log_probs"].values
        losses_T = -advantages_T * log_probs_T + 0.5 * away_T**2 / 2
        slopes_T = -advantages_T + 0.5 * away_T
        gradient_T = np.where(shown_T, slopes_T / sequences, 0.0)
        return float(losses_T[shown_T].sum() / sequences), {"log_probs": gradient_T}


class TestValue(ObjectiveConformance):
    """The clipped value loss."""

    plugin = ValueObjective


class TestNegativeLogLikelihood(ObjectiveConformance):
    """Token mean."""

    plugin = NegativeLogLikelihood
    config = NllConfig(name="nll")

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """−Σ log π over the tokens with mask 1, over their number; outputs and gradients are [T] each."""
        shown_T = mini_batch["response_mask"].values.astype(bool)
        log_probs_T = outputs["log_probs"].astype(np.float64)
        count = shown_T.sum()
        return -float(log_probs_T[shown_T].sum() / count), {
            "log_probs": np.where(shown_T, -1 / count, 0.0)
        }


class TestBradleyTerry(ObjectiveConformance):
    """One scored token a response."""

    plugin = BradleyTerry
    config = BradleyTerryConfig(name="bradley_terry")
    tolerance = 1e-6

    def mini_batch(self, seed: int) -> Batch:
        """The first token of every response has mask 1."""
        batch = super().mini_batch(seed)
        mask = batch["response_mask"]
        first_T = np.zeros(len(mask.values), np.bool_)
        first_T[mask.offsets[:-1]] = True
        return batch.with_columns({"response_mask": mask.with_values(first_T)})

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """−log σ(r_w − r_l), pair by pair; outputs and gradients are [T] each."""
        values_T, mask = outputs["values"].astype(np.float64), mini_batch["response_mask"]
        places_N, chosen_N = np.flatnonzero(mask.values), mini_batch["chosen"]
        loss, gradient_T, pairs = 0.0, np.zeros_like(values_T), len(mask) // 2
        for pair in range(pairs):
            (better,) = places_N[(mini_batch["pair_id"] == pair) & chosen_N]
            (worse,) = places_N[(mini_batch["pair_id"] == pair) & ~chosen_N]
            margin = values_T[better] - values_T[worse]
            loss += np.log1p(np.exp(-margin)) / pairs
            gradient_T[better] = -1 / (1 + np.exp(margin)) / pairs
            gradient_T[worse] = -gradient_T[better]
        return float(loss), {"values": gradient_T}
