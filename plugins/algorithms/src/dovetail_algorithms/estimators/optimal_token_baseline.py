"""Optimal token baseline: a baseline for every position, weighted by the energy of the paths up to that position.

Legend: K tokens of the policy, N samples, G groups, J trajectories.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from jaxtyping import Float64, Int64

from dovetail.batch import Batch
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.estimators.group_baseline import group_metrics
from dovetail_algorithms.estimators.token_level import PolicyTokens, TokenEstimator

EPSILON = 1e-8
"""Constant added to the sum of energies at a position."""
ROUNDING = 1e-6
"""Size of a negative energy up to which it counts as the rounding error of a probability near 1."""


class OptimalTokenBaselineEstimator(TokenEstimator):
    """Advantages relative to a separate baseline for every position of the response.

    A_t = G_t − B_t, B_t = Σ_j G_jt W_jt / (Σ_j W_jt + 1e-8), over the group's samples j with a policy token at t.

    G_t is the sum of rewards from t on. W_t = Σ_{s≤t} ρ_s² (1 − 2π_s + Σπ²_s) is the energy of the path up to t: the squared norm of its
    gradient with respect to the logits. π_s is the probability of the token at s, and Σπ²_s the sum of all tokens' squared probabilities
    there. ρ_s is the importance weight of the token by the rollout correction; 1 without a correction. B_t is the baseline of least
    variance for position t (as in verl; no paper describes it).

    Needs at least two samples a prompt, no value model, and an engine that gives `sum_pi_squared`. Positions count tool tokens too,
    unlike in `tir_optimal_token_baseline`. Beyond the length of the second longest response, the longest one has nothing to compare with,
    and its baseline is 0.
    """

    name = "optimal_token_baseline"
    scope = "group"
    positions_among_own: ClassVar[bool] = False
    """Whether tool tokens are left out of the count of positions."""

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask", "old_log_probs", "sum_pi_squared"})

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        return 2

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        returns_K = own.discounted_sums(own.take(columns["token_rewards"]), 1.0)
        energies_K = own.running_sums(_energies(columns, own))
        if groups.weights_N is not None:
            energies_K = energies_K * np.repeat(groups.weights_N, own.lengths_N)
        baseline_K = self._baselines(own, groups, returns_K, energies_K)
        # A group of one trajectory has nothing to compare with, so its advantages are 0.
        compared_K = np.repeat((groups.sizes_G > 1)[groups.index_N], own.lengths_N)
        advantages = own.column(np.where(compared_K, returns_K - baseline_K, 0.0))
        signal_N = advantages.with_values(np.abs(advantages.values)).sum()
        return Advantages(
            advantages=advantages,
            returns=own.column(returns_K),
            metrics=group_metrics(signal_N, groups),
        )

    def _baselines(
        self,
        own: PolicyTokens,
        groups: Groups,
        returns_K: Float64[np.ndarray, "K"],
        energies_K: Float64[np.ndarray, "K"],
    ) -> Float64[np.ndarray, "K"]:
        """Return the baseline Σ_j G_jt W_jt / (Σ_j W_jt + 1e-8) at each token, float64 [K]; j runs over the group's samples."""
        if self.positions_among_own:
            position_K = np.arange(len(returns_K)) - np.repeat(
                own.last_N + 1 - own.lengths_N, own.lengths_N
            )
        else:
            position_K = own.place_K - np.repeat(own.mask.offsets[:-1], own.lengths_N)
        some_N = own.lengths_N > 0
        reach_N = np.zeros(len(some_N), np.int64)
        reach_N[some_N] = position_K[own.last_N[some_N]] + 1
        reach_G = np.zeros(groups.count, np.int64)
        np.maximum.at(reach_G, groups.index_N, reach_N)
        group_K = np.repeat(groups.index_N, own.lengths_N)
        # `cell_K` numbers the pairs of group and position; a group has as many positions as its longest response.
        cell_K = (np.cumsum(reach_G) - reach_G)[group_K] + position_K
        weighted = np.bincount(cell_K, weights=returns_K * energies_K)
        baselines = weighted / (np.bincount(cell_K, weights=energies_K) + EPSILON)
        within_K = position_K < second_longest(reach_N, groups)[group_K]
        return np.where(within_K, baselines[cell_K], 0.0)


class TirOptimalTokenBaselineEstimator(OptimalTokenBaselineEstimator):
    """Advantages relative to a separate baseline for every position among the policy's own tokens.

    A_t = G_t − B_t as in `optimal_token_baseline`, but with positions counted among the policy's own tokens.

    For tool-integrated reasoning: tool outputs differ in length between the samples of a group, so that absolute positions are not
    comparable. The k-th policy token of a sample is compared with the k-th policy tokens of the others (as in verl; no paper describes
    it). Has the same requirements as `optimal_token_baseline`, and equals it if there are no tool tokens.
    """

    name = "tir_optimal_token_baseline"
    positions_among_own = True


def _energies(columns: Batch, own: PolicyTokens) -> Float64[np.ndarray, "K"]:
    """Return the energy ρ² (1 − 2π + Σπ²) of each token, float64 [K]."""
    pi_K = np.exp(own.take(columns["old_log_probs"]))
    energies_K: np.ndarray = 1 - 2 * pi_K + own.take(columns["sum_pi_squared"])
    energies_K[(energies_K < 0) & (energies_K > -ROUNDING)] = 0
    if "rollout_is_weights" in columns:
        energies_K *= own.take(columns["rollout_is_weights"]) ** 2
    return energies_K


def second_longest(lengths_N: Int64[np.ndarray, "N"], groups: Groups) -> Int64[np.ndarray, "G"]:
    """Return the length of the second longest response of each group, int64 [G]; 0 in a group of one.

    Several sequences of one trajectory count as one response, as long as the longest of them.
    """
    if groups.trajectory_N is None:
        lengths_J, group_J = lengths_N, groups.index_N
    else:
        _, first_J, row_N = np.unique(groups.trajectory_N, return_index=True, return_inverse=True)
        group_J = groups.index_N[first_J]
        lengths_J = np.zeros(len(first_J), np.int64)
        np.maximum.at(lengths_J, row_N, lengths_N)
    order_J = np.lexsort((lengths_J, group_J))
    sizes_G = np.bincount(group_J, minlength=groups.count)
    last_G = np.cumsum(sizes_G) - 1
    second_G = np.zeros(groups.count, np.int64)
    second_G[sizes_G > 1] = lengths_J[order_J[last_G[sizes_G > 1] - 1]]
    return second_G
