"""Conformance suites of the objectives of preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dovetail.batch import Batch
from dovetail_algorithms.config.objectives import (
    CpoConfig,
    DpoConfig,
    IpoConfig,
    OrpoConfig,
    SimpoConfig,
)
from dovetail_algorithms.objectives.preference import Cpo, Dpo, Ipo, Orpo, Simpo
from dovetail_sdk.testing.conformance import ObjectiveConformance


class PreferenceCases(ObjectiveConformance):
    """Shared tests of preference objectives. A subclass gives a pair's loss and its gradients from the paper's formulas.

    Legend: s and f are sums of a response's log-probabilities under the policy and under the reference, n its number of tokens. The index w
    is the chosen response, l the rejected one.
    """

    nll_coef: ClassVar[float] = 0.0

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return a pair's loss, and its derivatives with respect to s, [2].

        s and f are the sums of log-probabilities under policy and reference, n the numbers of tokens: [2] each, chosen before rejected.
        """
        raise NotImplementedError

    def outputs(self, mini_batch: Batch, seed: int) -> dict[str, np.ndarray]:
        """Return random log-probabilities below 0, [T] each, by the output's name."""
        return {name: -np.abs(o) for name, o in super().outputs(mini_batch, seed).items()}

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss, computed pair by pair, and its gradient for each output; outputs and gradients are [T] each."""
        mask, chosen_N = mini_batch["response_mask"], mini_batch["chosen"]

        def sums(values_T: np.ndarray) -> np.ndarray:
            shown_T = np.where(mask.values, values_T, 0).astype(np.float64)
            return np.array([row.sum() for row in mask.with_values(shown_T)])

        sums_N, counts_N = sums(outputs["log_probs"]), sums(np.ones(len(mask.values)))
        ref_N = np.zeros(len(mask))
        if "ref_log_probs" in mini_batch:
            ref_N = sums(mini_batch["ref_log_probs"].values)
        pairs, tokens = len(mask) // 2, counts_N[chosen_N].sum()
        loss, slopes_N = 0.0, np.zeros(len(mask))
        for pair in range(pairs):
            both = mini_batch["pair_id"] == pair
            rows = np.array([*np.flatnonzero(both & chosen_N), *np.flatnonzero(both & ~chosen_N)])
            own, slopes = self.pair(sums_N[rows], ref_N[rows], np.maximum(counts_N[rows], 1))
            loss += own / pairs - self.nll_coef * sums_N[rows[0]] / tokens
            slopes_N[rows] += slopes / pairs
            slopes_N[rows[0]] -= self.nll_coef / tokens
        gradient_T = np.where(mask.values, np.repeat(slopes_N, mask.lengths), 0)
        return float(loss), {"log_probs": gradient_T}


def _sigma(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


_SIDES = np.array([1.0, -1.0])


class TestDpo(PreferenceCases):
    """The objective `dpo` with smoothed labels and the likelihood of the chosen responses."""

    plugin = Dpo
    config = DpoConfig(name="dpo", beta=0.5, label_smoothing=0.1, nll_coef=0.3)
    nll_coef = 0.3

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return a pair's loss, and its derivatives with respect to s, [2].

        The loss is −(1 − ε) log σ(m) − ε log σ(−m), with the margin m = β ((s_w − f_w) − (s_l − f_l)) and ε the share of swapped labels.
        For s, f and n see `PreferenceCases.pair`.
        """
        m = 0.5 * float(_SIDES @ (s - f))
        slope = -0.9 * _sigma(-m) + 0.1 * _sigma(m)
        return 0.9 * np.log1p(np.exp(-m)) + 0.1 * np.log1p(np.exp(m)), 0.5 * slope * _SIDES


class TestRobustDpo(PreferenceCases):
    """The objective `dpo` with `robust`, for 20% wrong labels."""

    plugin = Dpo
    config = DpoConfig(name="dpo", beta=0.5, label_smoothing=0.2, robust=True)

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return robust DPO's loss of a pair, and its derivatives with respect to s, [2].

        The loss is (−(1 − ε) log σ(m) + ε log σ(−m)) / (1 − 2ε), with m the margin as in `TestDpo.pair` and ε the share of swapped labels.
        For s, f and n see `PreferenceCases.pair`.
        """
        m = 0.5 * float(_SIDES @ (s - f))
        loss = (0.8 * np.log1p(np.exp(-m)) - 0.2 * np.log1p(np.exp(m))) / 0.6
        slope = (-0.8 * _sigma(-m) - 0.2 * _sigma(m)) / 0.6
        return loss, 0.5 * slope * _SIDES


class LossOfRewards(PreferenceCases):
    """Base of test suites for losses that depend only on a pair's two rewards. Subclasses write the papers' formulas; gradients are central
    differences in float64.
    """

    plugin = Dpo
    beta, noise = 0.5, 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__.startswith("Test"):
            smoothed: dict[str, Any] = {"label_smoothing": cls.noise} if cls.noise else {}
            cls.config = DpoConfig(name="dpo", beta=cls.beta, **cls.settings, **smoothed)

    settings: ClassVar[Mapping[str, Any]] = {}

    def ahead(self, u: np.ndarray) -> np.ndarray:
        """Return g(u), [2]: the implicit rewards, before the factor β, of the log-ratios u, [2], under the f-divergence."""
        return u

    def loss(self, a: float, b: float) -> float:
        """Return the loss from the rewards `a` of the chosen and `b` of the rejected response."""
        raise NotImplementedError

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss of a pair with the rewards β g(s − f), and its derivatives with respect to s, [2].

        For s, f and n see `PreferenceCases.pair`.
        """

        def at(sums: np.ndarray) -> float:
            a, b = self.beta * self.ahead(sums - f)
            return self.loss(float(a), float(b))

        step = 1e-6
        slopes = [(at(s + step * e) - at(s - step * e)) / (2 * step) for e in np.eye(2)]
        return at(s), np.array(slopes)


class TestHinge(LossOfRewards):
    """The loss `hinge`, with a margin of 1."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "hinge"}

    def loss(self, a: float, b: float) -> float:
        return max(0.0, 1 - (a - b))


class TestExo(LossOfRewards):
    """The loss `exo`: the KL divergence of the policy's probabilities of the two responses from the target probabilities 0.9 and 0.1."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "exo"}
    noise = 0.1

    def loss(self, a: float, b: float) -> float:
        q = np.array([_sigma(a - b), _sigma(b - a)])
        return float((q * (np.log(q) - np.log([0.9, 0.1]))).sum())


class TestNca(LossOfRewards):
    """The loss `nca`, noise contrastive alignment."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "nca"}

    def loss(self, a: float, b: float) -> float:
        return -float(np.log(_sigma(a)) + (np.log(_sigma(-a)) + np.log(_sigma(-b))) / 2)


class TestBco(LossOfRewards):
    """The loss `bco`, which classifies each response at a threshold of 0."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "bco"}

    def loss(self, a: float, b: float) -> float:
        return -float(np.log(_sigma(a)) + np.log(_sigma(-b)))


class TestApoZero(LossOfRewards):
    """The loss `apo_zero`, which makes the chosen response more likely and the rejected one less likely."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "apo_zero"}

    def loss(self, a: float, b: float) -> float:
        return 1 - _sigma(a) + _sigma(b)


class TestApoDown(LossOfRewards):
    """The loss `apo_down`, which makes both responses less likely, the rejected one more so."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "apo_down"}

    def loss(self, a: float, b: float) -> float:
        return _sigma(a) + 1 - _sigma(a - b)


class TestSppoHard(LossOfRewards):
    """The loss `sppo_hard`, with win rates of 1 and 0."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "sppo_hard"}

    def loss(self, a: float, b: float) -> float:
        u_w, u_l, target = a / self.beta, b / self.beta, 1 / (2 * self.beta)
        return (u_w - target) ** 2 + (u_l + target) ** 2


class TestDiscopop(LossOfRewards):
    """The loss `discopop`, with a temperature of 0.5."""

    settings: ClassVar[Mapping[str, Any]] = {"loss": "discopop", "discopop_tau": 0.5}

    def loss(self, a: float, b: float) -> float:
        share = _sigma((a - b) / 0.5)
        return float(-(1 - share) * np.log(_sigma(a - b)) + share * np.exp(b - a))


class TestForwardKl(LossOfRewards):
    """The logistic loss with the forward KL divergence."""

    settings: ClassVar[Mapping[str, Any]] = {"f_divergence": "forward_kl"}

    def ahead(self, u: np.ndarray) -> np.ndarray:
        return 1 - 1 / np.exp(u)

    def loss(self, a: float, b: float) -> float:
        return -float(np.log(_sigma(a - b)))


class TestJensenShannon(TestForwardKl):
    """The logistic loss with the Jensen–Shannon divergence."""

    settings: ClassVar[Mapping[str, Any]] = {"f_divergence": "js"}

    def ahead(self, u: np.ndarray) -> np.ndarray:
        return np.log(2 * np.exp(u) / (1 + np.exp(u)))


class TestAlphaDivergence(TestForwardKl):
    """The logistic loss with an α-divergence."""

    settings: ClassVar[Mapping[str, Any]] = {"f_divergence": "alpha", "f_alpha": 0.3}

    def ahead(self, u: np.ndarray) -> np.ndarray:
        return (np.exp(u) ** (0.3 - 1) - 1) / (0.3 - 1)


class TestCpo(PreferenceCases):
    """The objective `cpo`, with the likelihood of the chosen responses."""

    plugin = Cpo
    config = CpoConfig(name="cpo", beta=0.4, nll_coef=0.7)
    nll_coef = 0.7

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return a pair's loss, and its derivatives with respect to s, [2].

        The loss is −log σ(m), with the margin m = β (s_w − s_l). For s, f and n see `PreferenceCases.pair`.
        """
        m = 0.4 * float(_SIDES @ s)
        return float(np.log1p(np.exp(-m))), -0.4 * _sigma(-m) * _SIDES


class TestIpo(PreferenceCases):
    """The objective `ipo`, with a target margin of 1."""

    plugin = Ipo
    config = IpoConfig(name="ipo", beta=0.5)

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return a pair's loss, and its derivatives with respect to s, [2].

        The loss is ((s_w − f_w)/n_w − (s_l − f_l)/n_l − 1/(2β))². For s, f and n see `PreferenceCases.pair`.
        """
        away = float(_SIDES @ ((s - f) / n)) - 1.0
        return away**2, 2 * away * _SIDES / n


class TestSimpo(PreferenceCases):
    """The objective `simpo`, with a margin."""

    plugin = Simpo
    config = SimpoConfig(name="simpo", beta=2.0, gamma=0.5)

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return a pair's loss, and its derivatives with respect to s, [2].

        The loss is −log σ(β (s_w/n_w − s_l/n_l) − γ), with γ the margin. For s, f and n see `PreferenceCases.pair`.
        """
        m = 2.0 * float(_SIDES @ (s / n)) - 0.5
        return float(np.log1p(np.exp(-m))), -2.0 * _sigma(-m) * _SIDES / n


class TestOrpo(PreferenceCases):
    """The objective `orpo`: odds ratio, and likelihood of the chosen responses."""

    plugin = Orpo
    config = OrpoConfig(name="orpo", beta=0.4)
    nll_coef = 1.0

    def mini_batch(self, seed: int) -> Batch:
        """Make samples without empty responses, whose odds would be infinite."""
        batch = super().mini_batch(seed)
        mask = batch["response_mask"]
        shown_T = mask.values.copy()
        shown_T[mask.offsets[:-1]] = True
        return batch.with_columns({"response_mask": mask.with_values(shown_T)})

    def pair(self, s: np.ndarray, f: np.ndarray, n: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the pair's odds-ratio loss, and its derivatives with respect to s, [2].

        The loss is −λ log σ(log odds_w − log odds_l), with odds = p/(1 − p), p = exp(s/n) and λ the loss's weight. For s, f and n see
        `PreferenceCases.pair`.
        """
        p = np.exp(s / n)
        m = float(_SIDES @ np.log(p / (1 - p)))
        return 0.4 * np.log1p(np.exp(-m)), -0.4 * _sigma(-m) * _SIDES / (1 - p) / n
