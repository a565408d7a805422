"""Advantages, losses, gradients and KL estimates equal those of verl's own functions, imported from its wheel.

verl runs in an environment of its own (`make .venv-verl/.ready`), which sees this one's packages. verl computes in padded
matrices, in float64 here; Dovetail in packed columns.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, LossInputs, PluginContext
from dovetail_algorithms.config import estimators, losses
from dovetail_algorithms.estimators.dr_grpo import DrGrpoEstimator
from dovetail_algorithms.estimators.gae import GaeEstimator
from dovetail_algorithms.estimators.gdpo import GdpoEstimator
from dovetail_algorithms.estimators.grpo import GrpoEstimator
from dovetail_algorithms.estimators.grpo_passk import GrpoPasskEstimator
from dovetail_algorithms.estimators.opo import OpoEstimator
from dovetail_algorithms.estimators.optimal_token_baseline import (
    OptimalTokenBaselineEstimator,
    TirOptimalTokenBaselineEstimator,
)
from dovetail_algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusEstimator
from dovetail_algorithms.estimators.reinforce_plus_plus_baseline import (
    ReinforcePlusPlusBaselineEstimator,
)
from dovetail_algorithms.estimators.remax import RemaxEstimator
from dovetail_algorithms.estimators.rloo import RlooEstimator
from dovetail_algorithms.losses.cispo import CispoLoss
from dovetail_algorithms.losses.dppo import DppoLoss
from dovetail_algorithms.losses.dro import DroLoss
from dovetail_algorithms.losses.gmpo import GmpoLoss
from dovetail_algorithms.losses.gpg import GpgLoss
from dovetail_algorithms.losses.gspo import GspoLoss
from dovetail_algorithms.losses.ppo_clip import PpoClipLoss
from dovetail_algorithms.losses.sapo import SapoLoss
from dovetail_stages.config import SeqMeanTokenSumNormConfig
from dovetail_stages.numerics.kl import estimate_kl
from dovetail_stages.numerics.loss_aggregation import (
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)

pytestmark = pytest.mark.verl

GROUPS = (0, 0, 0, 0, 1, 1, 1, 2, 2)
LENGTHS = (5, 3, 9, 9, 2, 7, 4, 1, 6)
WIDTH = max(LENGTHS)
SEEDS = range(5)


@attrs.frozen
class Rows:
    """Random samples: matrices [N, WIDTH] as verl has them, whose columns also exist packed."""

    mask: np.ndarray
    matrices: dict[str, np.ndarray]
    scores: np.ndarray
    greedy: np.ndarray

    @classmethod
    def random(cls, seed: int, *, tools: bool) -> Rows:
        """Return samples, with tool tokens between those of the policy if `tools`.

        Values are exact in float32, in which Dovetail keeps columns.
        """
        rng = np.random.default_rng(seed)
        there = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
        mask = there & (rng.random(there.shape) < 0.7) if tools else there
        mask[np.arange(len(mask)), np.array(LENGTHS) - 1] = True

        def numbers(low: float, high: float) -> np.ndarray:
            drawn = rng.uniform(low, high, there.shape)
            return np.where(there, drawn, 0).astype(np.float32).astype(np.float64)

        matrices = {
            "values": numbers(-1, 1),
            "old_log_probs": numbers(-3, -0.1),
            "log_probs": numbers(-3, -0.1),
            "sum_pi_squared": numbers(0.5, 1),
            "token_rewards": np.where(mask, numbers(-1, 1), 0),
        }
        scores, greedy = rng.integers(-8, 9, (2, len(mask))) / 8
        return cls(mask, matrices, scores, greedy)

    def outcome_rewards(self) -> np.ndarray:
        """Return the scores as rewards of each row's last token, [N, WIDTH]."""
        rewards = np.zeros(self.mask.shape)
        rewards[np.arange(len(rewards)), np.array(LENGTHS) - 1] = self.scores
        return rewards

    def packed(self, matrix: np.ndarray, dtype: Any = np.float32) -> Ragged:
        """Return a matrix without its padding."""
        rows = [row[:length] for row, length in zip(matrix, LENGTHS, strict=True)]
        return Ragged.from_list(rows, dtype=dtype)

    def batch(self) -> Batch:
        """Return the columns that estimators read."""
        columns: dict[str, Any] = {n: self.packed(m) for n, m in self.matrices.items()}
        components = [{"right": s, "short": g} for s, g in zip(self.scores, self.greedy, strict=True)]  # fmt: skip
        return Batch(
            columns
            | {
                "response_mask": self.packed(self.mask, bool),
                "scores": self.scores.astype(np.float32),
                "baseline_scores": self.greedy.astype(np.float32),
                "reward_components": components,
            }
        )


@attrs.frozen
class Estimate:
    """One of Dovetail's estimators, verl's function of the same formula, and what that is given besides."""

    plugin: Any
    config: Any
    verl: str
    reads: tuple[str, ...] = ()
    given: dict[str, Any] = attrs.field(factory=dict)
    outcome: bool = True
    """Whether the only reward is that of the last token."""


ESTIMATES = {
    "grpo": Estimate(GrpoEstimator, None, "grpo"),
    "dr_grpo": Estimate(DrGrpoEstimator, None, "grpo", given={"norm_adv_by_std_in_grpo": False}),
    "grpo_passk": Estimate(
        GrpoPasskEstimator, None, "grpo_passk", given={"config": {"norm_adv_by_std_in_grpo": False}}
    ),
    "grpo_passk by std": Estimate(
        GrpoPasskEstimator,
        estimators.GrpoPasskConfig(norm_by_std=True),
        "grpo_passk",
        given={"config": {"norm_adv_by_std_in_grpo": True}},
    ),
    "rloo": Estimate(RlooEstimator, None, "rloo"),
    "rloo, vectorised": Estimate(RlooEstimator, None, "rloo_vectorized"),
    "opo": Estimate(OpoEstimator, None, "opo"),
    "reinforce_plus_plus_baseline": Estimate(
        ReinforcePlusPlusBaselineEstimator, None, "reinforce_plus_plus_baseline"
    ),
    "reinforce_plus_plus": Estimate(
        ReinforcePlusPlusEstimator,
        estimators.ReinforcePlusPlusConfig(gamma=0.9),
        "reinforce_plus_plus",
        given={"config": attrs.make_class("Gamma", ["gamma"])(0.9)},
        outcome=False,
    ),
    "gae": Estimate(
        GaeEstimator,
        estimators.GaeConfig(gamma=0.9, lam=0.8),
        "gae",
        reads=("values",),
        given={"gamma": 0.9, "lam": 0.8},
        outcome=False,
    ),
    "remax": Estimate(RemaxEstimator, None, "remax", outcome=False),
    "optimal_token_baseline": Estimate(
        OptimalTokenBaselineEstimator,
        None,
        "optimal_token_baseline",
        reads=("old_log_probs", "sum_pi_squared"),
        outcome=False,
    ),
    "tir_optimal_token_baseline": Estimate(
        TirOptimalTokenBaselineEstimator,
        None,
        "tir_optimal_token_baseline",
        reads=("old_log_probs", "sum_pi_squared"),
        outcome=False,
    ),
}
APART = ("optimal_token_baseline", True)
"""With tool tokens verl's lengths leave them out and its positions do not; Dovetail's both count them."""


@pytest.fixture(scope="module")
def core_algos() -> Any:
    """verl's module of advantages, losses and KL estimates."""
    try:
        importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("verl is not installed here; `make proofs` has it")
    # Here a package that verl lacks is an error, not a skip.
    return importlib.import_module("verl.trainer.ppo.core_algos")


def close(found: np.ndarray, expected: torch.Tensor, mask: np.ndarray) -> None:
    """Compare what is at the policy's tokens."""
    np.testing.assert_allclose(
        found[mask], expected.detach().numpy()[mask], rtol=1e-5, atol=2e-6
    )  # fmt: skip


def spread(rows: Rows, column: Any) -> np.ndarray:
    """Return a packed column, or one value a sample, as a matrix [N, WIDTH]."""
    if not isinstance(column, Ragged):
        return np.repeat(np.asarray(column)[:, None], WIDTH, axis=1)
    matrix = np.zeros(rows.mask.shape)
    for n, row in enumerate(column):
        matrix[n, : len(row)] = row
    return matrix


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "tools"),
    [(name, tools) for name in ESTIMATES for tools in (False, True) if (name, tools) != APART],
)
def test_advantages_and_returns_equal_those_of_verl(
    name: str, tools: bool, seed: int, core_algos: Any
) -> None:
    case, rows = ESTIMATES[name], Rows.random(seed, tools=tools)
    batch = rows.batch()
    if case.outcome:
        batch = batch.with_columns({"token_rewards": rows.packed(rows.outcome_rewards())})
    config = case.config or case.plugin.Config()
    ours = case.plugin(config, PluginContext()).estimate(batch, Groups.of(np.array(GROUPS)))
    rewards = rows.outcome_rewards() if case.outcome else rows.matrices["token_rewards"]
    given: dict[str, Any] = {
        "token_level_rewards": torch.tensor(rewards),
        "response_mask": torch.tensor(rows.mask, dtype=torch.float64),
        **{column: torch.tensor(rows.matrices[column]) for column in case.reads},
        **case.given,
    }
    if case.verl == "remax":
        given["reward_baselines"] = torch.tensor(rows.greedy)
    elif case.verl not in ("gae", "reinforce_plus_plus"):
        given["index"] = np.array(GROUPS)
    advantages, returns = core_algos.get_adv_estimator_fn(case.verl)(**given)
    close(spread(rows, ours.advantages), advantages, rows.mask)
    if ours.returns is not None:
        close(spread(rows, ours.returns), returns, rows.mask)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_equals_that_of_verl(seed: int, core_algos: Any) -> None:
    rows = Rows.random(seed, tools=False)
    config = estimators.GdpoConfig(components=("right", "short"), weights=(1.0, 0.5))
    estimator = GdpoEstimator(config, PluginContext())
    ours = estimator.estimate(rows.batch(), Groups.of(np.array(GROUPS)))
    advantages, _ = core_algos.get_adv_estimator_fn("gdpo")(
        token_level_rewards=torch.tensor(rows.outcome_rewards()),
        response_mask=torch.tensor(rows.mask, dtype=torch.float64),
        index=np.array(GROUPS),
        config={"gdpo_reward_keys": ["right", "short"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"right": rows.scores, "short": rows.greedy},
        batch={"prompts": torch.ones(len(GROUPS), 1), "attention_mask": torch.tensor(np.insert(rows.mask, 0, True, axis=1)).long()},
    )  # fmt: skip
    close(spread(rows, ours.advantages), advantages, rows.mask)


@attrs.frozen
class Loss:
    """One of Dovetail's policy losses, and verl's of the same formula with its settings."""

    plugin: Any
    config: Any
    verl: str
    settings: dict[str, Any] = attrs.field(factory=dict)
    aggregation: Any = TokenMean


BOTH = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
LOSSES = {
    "ppo_clip": Loss(PpoClipLoss, losses.PpoClipConfig(clip_high=0.28), "vanilla", BOTH),
    "ppo_clip, dual": Loss(
        PpoClipLoss,
        losses.PpoClipConfig(clip_high=0.28, dual_clip=1.5),
        "vanilla",
        BOTH | {"clip_ratio_c": 1.5},
    ),
    "gspo": Loss(
        GspoLoss, losses.GspoConfig(clip_low=0.2, clip_high=0.28), "gspo", BOTH, SeqMeanTokenMean
    ),
    "gmpo": Loss(
        GmpoLoss, losses.GmpoConfig(clip_low=0.2, clip_high=0.28), "geo_mean", BOTH, SeqMeanTokenMean
    ),
    "cispo": Loss(CispoLoss, losses.CispoConfig(clip_low=0.2, clip_high=0.28), "cispo", BOTH),
    "sapo": Loss(SapoLoss, losses.SapoConfig(), "sapo", aggregation=SeqMeanTokenMean),
    "gpg": Loss(GpgLoss, None, "gpg"),
    "dro": Loss(DroLoss, losses.DroConfig(beta=0.3), "dro", {"dro_beta": 0.3}),
    **{
        f"dppo, {divergence}": Loss(
            DppoLoss,
            losses.DppoConfig(divergence=divergence, threshold=0.1),
            verl,
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0},
        )
        for divergence, verl in (("total_variation", "dppo_tv"), ("binary_kl", "dppo_kl"))
    },
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": TokenMean,
    "token-sum": TokenSum,
    "seq-mean-token-sum": SeqMeanTokenSum,
    "seq-mean-token-mean": SeqMeanTokenMean,
    "seq-mean-token-sum-norm": SeqMeanTokenSumNorm,
}


def aggregation(cls: Any) -> Any:
    """Return an aggregation, that with a norm for a length of 7."""
    config = SeqMeanTokenSumNormConfig(length=7) if cls is SeqMeanTokenSumNorm else cls.Config()
    return cls(config, PluginContext())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tools", [False, True], ids=["answers", "with tool tokens"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_those_of_verl(
    name: str, tools: bool, seed: int, core_algos: Any
) -> None:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    case, rows = LOSSES[name], Rows.random(seed, tools=tools)
    # One advantage a sample, on which losses of sequences rely.
    advantages = np.repeat(rows.scores[:, None], WIDTH, axis=1)
    ours = rows.packed(rows.matrices["log_probs"] * rows.mask, np.float64)
    mask = rows.packed(rows.mask, bool)
    inputs = LossInputs(
        log_probs_T=torch.tensor(ours.values).requires_grad_(),
        mask_T=torch.tensor(mask.values),
        offsets_N1=torch.tensor(ours.offsets),
        columns={
            column: torch.tensor(rows.packed(matrix * rows.mask, np.float64).values)
            for column, matrix in (
                ("advantages", advantages),
                ("old_log_probs", rows.matrices["old_log_probs"]),
                ("rollout_log_probs", rows.matrices["old_log_probs"]),
            )
        },
    )
    plugin = case.plugin(case.config or case.plugin.Config(), PluginContext())
    summed = aggregation(case.aggregation)
    token_losses = plugin.token_losses(inputs).losses_T
    total = summed.total(token_losses, inputs.mask_T, inputs.offsets_N1)
    loss = total / summed.denominator(mask)
    (gradient_T,) = torch.autograd.grad(loss, inputs.log_probs_T)

    settings = dict(case.settings)
    own = PolicyLossConfig(loss_mode=case.verl, dro_beta=settings.pop("dro_beta", None))
    config = ActorConfig(
        strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=1, policy_loss=own, **settings
    )
    log_probs = torch.tensor(rows.matrices["log_probs"]).requires_grad_()
    theirs, _ = core_algos.get_policy_loss_fn(case.verl)(
        old_log_prob=torch.tensor(rows.matrices["old_log_probs"]),
        log_prob=log_probs,
        advantages=torch.tensor(advantages),
        response_mask=torch.tensor(rows.mask, dtype=torch.float64),
        loss_agg_mode="seq-mean-token-mean" if case.aggregation is SeqMeanTokenMean else "token-mean",
        config=config,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(theirs, log_probs)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-9)
    close(spread(rows, ours.with_values(gradient_T.numpy())), gradient, rows.mask)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations_equal_those_of_verl(mode: str, core_algos: Any) -> None:
    rows = Rows.random(0, tools=True)
    summed, mask = aggregation(AGGREGATIONS[mode]), rows.packed(rows.mask, bool)
    values = rows.packed(rows.matrices["values"], np.float64)
    total = summed.total(
        torch.tensor(values.values), torch.tensor(mask.values), torch.tensor(mask.offsets)
    )
    theirs = core_algos.agg_loss(
        loss_mat=torch.tensor(rows.matrices["values"]),
        loss_mask=torch.tensor(rows.mask, dtype=torch.float64),
        loss_agg_mode=mode,
        loss_scale_factor=7,
    )
    assert total.item() / summed.denominator(mask) == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_estimates_and_gradients_equal_those_of_verl(estimator: str, core_algos: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = -8 * torch.rand((2, 200), generator=generator)
    results = []
    for estimate in (
        lambda log_probs: estimate_kl(estimator, log_probs, drawn[1]),
        lambda log_probs: core_algos.kl_penalty(log_probs, drawn[1], estimator),
    ):
        log_probs = drawn[0].clone().requires_grad_()
        found = estimate(log_probs)
        (gradient,) = torch.autograd.grad(found.sum(), log_probs)
        results.append((found.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
