"""Conformance suites of the objectives, those of preference pairs excepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from dovetail.batch import Batch
from dovetail.sections import PluginSection
from dovetail_algorithms.config.objectives import (
    BradleyTerryConfig,
    ImplicitPrmConfig,
    KtoConfig,
    NllConfig,
    PolicyConfig,
    SppoConfig,
)
from dovetail_algorithms.objectives.bradley_terry import BradleyTerry
from dovetail_algorithms.objectives.implicit_prm import ImplicitPrm
from dovetail_algorithms.objectives.kto import Kto
from dovetail_algorithms.objectives.nll import NegativeLogLikelihood
from dovetail_algorithms.objectives.policy import PolicyObjective
from dovetail_algorithms.objectives.sppo import Sppo
from dovetail_algorithms.objectives.value import ValueObjective
from dovetail_sdk.testing.conformance import ObjectiveConformance

TestPolicy = ObjectiveConformance.of(
    PolicyObjective,
    PolicyConfig(name="policy", kl="k3", entropy=True),
    scalars={"kl_coef": 0.1, "entropy_coef": 0.01},
)


class TestPolicyOfReinforce(ObjectiveConformance):
    """The objective `policy` with the policy loss `reinforce`, the aggregation `seq_mean_token_sum` and a KL penalty (k2)."""

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
        """Return the loss, and its gradient for each output, [T].

        The loss is Σ (−A log π + c/2 (log π − log π_ref)²) / (number of sequences), with c the KL penalty's weight.
        """
        mask = mini_batch["response_mask"]
        shown_T, sequences = mask.values, np.count_nonzero(mask.sum())
        advantages_T = mini_batch["advantages"].values.astype(np.float64)
        log_probs_T = outputs["log_probs"].astype(np.float64)
        away_T = log_probs_T - mini_batch["ref_log_probs"].values
        losses_T = -advantages_T * log_probs_T + 0.5 * away_T**2 / 2
        slopes_T = -advantages_T + 0.5 * away_T
        gradient_T = np.where(shown_T, slopes_T / sequences, 0.0)
        return float(losses_T[shown_T].sum() / sequences), {"log_probs": gradient_T}


TestValue = ObjectiveConformance.of(ValueObjective)


class TestNegativeLogLikelihood(ObjectiveConformance):
    """The objective `nll` with the token mean."""

    plugin = NegativeLogLikelihood
    config = NllConfig(name="nll")

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the mean of −log π over the tokens with mask 1, and its gradient; outputs and gradients are [T] each."""
        shown_T = mini_batch["response_mask"].values.astype(bool)
        log_probs_T = outputs["log_probs"].astype(np.float64)
        count = shown_T.sum()
        return -float(log_probs_T[shown_T].sum() / count), {
            "log_probs": np.where(shown_T, -1 / count, 0.0)
        }


def _sigma(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


class TestKto(ObjectiveConformance):
    """The objective `kto` with a KL estimate above 0, and different weights of desirable and undesirable responses."""

    plugin = Kto
    config = KtoConfig(name="kto", beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)

    def mini_batch(self, seed: int) -> Batch:
        """Make samples with a KL estimate above 0; for seed 2, with a negative estimate, which KTO replaces by 0.

        The estimate is the mean log-ratio of policy to reference for responses under another sample's prompt.
        """
        batch = super().mini_batch(seed)
        shift = np.float32(-3.0 if seed == 2 else 1.0)
        return batch.with_columns({"mismatched_log_ratios": batch["mismatched_log_ratios"] + shift})

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, computed response by response, and its gradient for each output; outputs and gradients are [T] each."""
        mask = mini_batch["response_mask"]
        z = max(0.0, float(np.mean(mini_batch["mismatched_log_ratios"].astype(np.float64))))
        away_T = outputs["log_probs"].astype(np.float64) - mini_batch["ref_log_probs"].values
        ratios = [row.sum() for row in mask.with_values(np.where(mask.values, away_T, 0))]
        loss, slopes_N = 0.0, np.zeros(len(mask))
        for i, (r, wanted) in enumerate(zip(ratios, mini_batch["desirable"], strict=True)):
            weight, sign = (1.5, 1) if wanted else (0.5, -1)
            value = _sigma(sign * 0.5 * (r - z))
            loss += weight * (1 - value) / len(mask)
            slopes_N[i] = -weight * value * (1 - value) * sign * 0.5 / len(mask)
        gradient_T = np.where(mask.values, np.repeat(slopes_N, mask.lengths), 0)
        return float(loss), {"log_probs": gradient_T}


class TestBradleyTerry(ObjectiveConformance):
    """The objective `bradley_terry` with one scored token per response, margins, and scores pulled to 0."""

    plugin = BradleyTerry
    config = BradleyTerryConfig(name="bradley_terry", margin=True, center_coef=0.1)
    tolerance = 1e-6

    def mini_batch(self, seed: int) -> Batch:
        """Make samples with mask 1 only on the first token of each response."""
        batch = super().mini_batch(seed)
        mask = batch["response_mask"]
        first_T = np.zeros(len(mask.values), np.bool_)
        first_T[mask.offsets[:-1]] = True
        return batch.with_columns({"response_mask": mask.with_values(first_T)})

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, and its gradient, [T].

        The loss is the mean over pairs of −log σ(r_w − r_l − m) + c (r_w + r_l)²; for the symbols see `BradleyTerry`.
        """
        values_T, mask = outputs["values"].astype(np.float64), mini_batch["response_mask"]
        places_N, chosen_N = np.flatnonzero(mask.values), mini_batch["chosen"]
        loss, gradient_T, pairs = 0.0, np.zeros_like(values_T), len(mask) // 2
        for pair in range(pairs):
            (better,) = places_N[(mini_batch["pair_id"] == pair) & chosen_N]
            (worse,) = places_N[(mini_batch["pair_id"] == pair) & ~chosen_N]
            wanted = float(mini_batch["margin"][(mini_batch["pair_id"] == pair) & chosen_N][0])
            ahead, total = (
                values_T[better] - values_T[worse] - wanted,
                values_T[better] + values_T[worse],
            )
            loss += (np.log1p(np.exp(-ahead)) + 0.1 * total**2) / pairs
            gradient_T[better] = (-_sigma(-ahead) + 0.2 * total) / pairs
            gradient_T[worse] = (_sigma(-ahead) + 0.2 * total) / pairs
        return float(loss), {"values": gradient_T}


class TestImplicitPrm(ObjectiveConformance):
    """The objective `implicit_prm`, with outcomes between 0 (wrong) and 1 (right)."""

    plugin = ImplicitPrm
    config = ImplicitPrmConfig(name="implicit_prm", beta=0.3)

    def mini_batch(self, seed: int) -> Batch:
        """Make samples with outcomes of 0, 1, and in between."""
        outcomes_N = np.resize([0, 1, 0.25], 8).astype(np.float32)
        return super().mini_batch(seed).with_columns({"prm_outcomes": outcomes_N})

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, computed sample by sample, and its gradient for each output; outputs and gradients are [T] each."""
        mask = mini_batch["response_mask"]
        log_probs_T, gradient_T = (
            outputs["log_probs"].astype(np.float64),
            np.zeros(len(mask.values)),
        )
        loss, rows = 0.0, [row for row in range(len(mask)) if mask[row].any()]
        for row in rows:
            own = np.flatnonzero(mask[row]) + mask.offsets[row]
            log_ratios = log_probs_T[own] - mini_batch["prm_ref_log_probs"].values[own]
            right = 1 / (1 + np.exp(-0.3 * log_ratios.sum()))
            outcome = float(mini_batch["prm_outcomes"][row])
            loss -= (outcome * np.log(right) + (1 - outcome) * np.log(1 - right)) / len(rows)
            gradient_T[own] = 0.3 * (right - outcome) / len(rows)
        return float(loss), {"log_probs": gradient_T}


class TestSppo(ObjectiveConformance):
    """The objective `sppo` with targets of a few nats."""

    plugin = Sppo
    config = SppoConfig(name="sppo", eta=4.0)
    tolerance = 1e-4

    def mini_batch(self, seed: int) -> Batch:
        """Return samples with one advantage each."""
        wins_N = np.linspace(-0.5, 0.5, 8).astype(np.float32)
        return super().mini_batch(seed).with_columns({"advantages": wins_N})

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, computed sample by sample, and its gradient for each output; outputs and gradients are [T] each."""
        mask = mini_batch["response_mask"]
        log_probs_T, gradient_T = (
            outputs["log_probs"].astype(np.float64),
            np.zeros(len(mask.values)),
        )
        loss, rows = 0.0, [row for row in range(len(mask)) if mask[row].any()]
        for row in rows:
            own = np.flatnonzero(mask[row]) + mask.offsets[row]
            log_ratio = (log_probs_T[own] - mini_batch["ref_log_probs"].values[own]).sum()
            short = log_ratio - 4.0 * float(mini_batch["advantages"][row])
            loss += short**2 / len(rows)
            gradient_T[own] = 2 * short / len(rows)
        return float(loss), {"log_probs": gradient_T}
