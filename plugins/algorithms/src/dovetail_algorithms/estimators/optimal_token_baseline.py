"""Optimal token baseline: one for every position, weighted by the energy of the paths that lead there.

Legend: T tokens, N samples, G groups, J trajectories.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int64

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Advantages, Groups
from dovetail_algorithms.config.estimators import (
    OptimalTokenBaselineConfig,
    TirOptimalTokenBaselineConfig,
)
from dovetail_algorithms.estimators.baselines import optimal_baseline
from dovetail_algorithms.estimators.group_baseline import group_metrics
from dovetail_algorithms.estimators.lengths import policy_lengths
from dovetail_algorithms.estimators.parts import in_threads
from dovetail_algorithms.estimators.token_level import TokenEstimator

PART = 1 << 17
"""Tokens that one thread works on at once."""
ROUNDING = 1e-6
"""A negative energy this small is the rounding error of a probability near 1."""


class OptimalTokenBaseline(TokenEstimator):
    """A_t = G_t − B_t, B_t = Σ_j G_jt W_jt / (Σ_j W_jt + 1e-8), over the group's samples j with a policy token at t.

    G_t is the sum of rewards from t on; W_t = Σ_{s≤t} ρ_s² (1 − 2π_s + Σπ²_s) the energy of the path up to t, that is the squared
    norm of its gradient with respect to the logits, and ρ the weights of a rollout correction, where there is one. It is the
    baseline of least variance for each position (as in verl; it has no paper of its own).

    Needs at least two samples a prompt, no value model, and an engine that gives `sum_pi_squared`. Positions count
    tool tokens too; `tir_optimal_token_baseline` does not. The part of the longest response beyond the second
    longest has nothing to compare with, and baseline 0.
    """

    name = "optimal_token_baseline"
    Config: ClassVar[Any] = OptimalTokenBaselineConfig
    scope = "group"
    positions_among_own: ClassVar[bool] = False
    """Whether tool tokens are left out of the count of positions."""

    @classmethod
    def requires(cls, config: Any) -> frozenset[str]:
        return frozenset({"token_rewards", "response_mask", "old_log_probs", "sum_pi_squared"})

    @classmethod
    def min_group_size(cls, config: Any) -> int:
        return 2

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        mask = self.mask(columns)
        compact = self.positions_among_own
        lengths_N = policy_lengths(mask) if compact else own_reach(mask)
        sizes_G = np.bincount(groups.index_N, minlength=groups.count)
        order_N = np.argsort(groups.index_N, kind="stable")
        sorted_ = bool(np.all(groups.index_N[:-1] <= groups.index_N[1:]))
        rows = columns if sorted_ else columns.select(self._reads(columns)).take(order_N)
        own = rows["response_mask"]
        weights_N = groups.weights_N
        advantages_T, returns_T = optimal_baseline(
            rows["token_rewards"].values.astype(np.float32, copy=False),
            _energies_T(rows),
            own.values.astype(np.bool_, copy=False),
            own.offsets,
            np.concatenate([[0], np.cumsum(sizes_G)]).astype(np.int64),
            np.ones(len(mask)) if weights_N is None else weights_N[order_N],
            second_longest(lengths_N, groups),
            compact=compact,
        )
        advantages, returns = own.with_values(advantages_T), own.with_values(returns_T)
        if not sorted_:
            back_N = np.argsort(order_N)
            advantages, returns = advantages.take(back_N), returns.take(back_N)
        advantages = _without_singletons(advantages, groups)
        return Advantages(
            advantages=advantages,
            returns=returns,
            metrics=group_metrics(_signal_N(advantages), groups),
        )

    def _reads(self, columns: Batch) -> list[str]:
        optional = {"rollout_is_weights"} & set(columns.names)
        return sorted(self.requires(self.config) | optional)


class TirOptimalTokenBaseline(OptimalTokenBaseline):
    """A_t = G_t − B_t as `optimal_token_baseline`, with positions counted among the policy's own tokens.

    For tool-integrated reasoning: what a tool returns differs in length between the samples of a group, so that their
    positions no longer mean the same. Here the k-th token that the policy wrote is compared with the others' k-th
    (as in verl; it has no paper of its own). Needs what `optimal_token_baseline` needs, and
    equals it where there are no tool tokens.
    """

    name = "tir_optimal_token_baseline"
    Config: ClassVar[Any] = TirOptimalTokenBaselineConfig
    positions_among_own = True


def _energies_T(columns: Batch) -> Float32[np.ndarray, "T"]:
    """float32 [T]: ρ² (1 − 2π + Σπ²) of each token, of which those with mask 0 hold anything."""
    log_probs_T, squares_T = columns["old_log_probs"].values, columns["sum_pi_squared"].values
    weights = columns["rollout_is_weights"].values if "rollout_is_weights" in columns else None
    energies_T = np.empty(len(log_probs_T), np.float32)
    starts = range(0, len(log_probs_T), PART)

    def work(part: int) -> None:
        block = slice(starts[part], starts[part] + PART)
        out = energies_T[block]
        np.exp(log_probs_T[block], out=out, dtype=np.float32, casting="same_kind")
        out *= -2
        out += 1
        out += squares_T[block]
        if out.min() < 0:
            out[(out < 0) & (out > -ROUNDING)] = 0
        if weights is not None:
            out *= weights[block]
            out *= weights[block]

    in_threads(len(starts), work)
    return energies_T


def own_reach(mask: Ragged) -> Int64[np.ndarray, "N"]:
    """int64 [N]: position after the last token with mask 1 in each row; 0 where there is none."""
    reach_N = mask.lengths.copy()
    some = np.flatnonzero(reach_N > 0)
    # Most responses end with a token of the policy; only the others are searched.
    late = some[~mask.values[mask.offsets[some + 1] - 1]]
    if len(late):
        rows = mask.take(late)
        own = np.flatnonzero(rows.values)
        bounds = np.searchsorted(own, rows.offsets)
        found = bounds[1:] > bounds[:-1]
        last = own[bounds[1:][found] - 1]
        reach_N[late] = 0
        reach_N[late[found]] = last + 1 - rows.offsets[:-1][found]
    return reach_N


def _without_singletons(advantages: Ragged, groups: Groups) -> Ragged:
    """0 in groups of one trajectory, which has nothing to compare with."""
    alone_N = (groups.sizes_G < 2)[groups.index_N]
    if alone_N.any():
        advantages.values[np.repeat(alone_N, advantages.lengths)] = 0
    return advantages


def _signal_N(advantages: Ragged) -> Float32[np.ndarray, "N"]:
    """float32 [N]: the largest absolute advantage of each sample."""
    signal_N = np.zeros(len(advantages), np.float32)
    some_N = advantages.lengths > 0
    if some_N.any():
        starts = advantages.offsets[:-1][some_N]
        signal_N[some_N] = np.maximum(
            np.maximum.reduceat(advantages.values, starts),
            -np.minimum.reduceat(advantages.values, starts),
        )
    return signal_N


def second_longest(lengths_N: Int64[np.ndarray, "N"], groups: Groups) -> Int64[np.ndarray, "G"]:
    """int64 [G]: length of the second longest response of each group; 0 in a group of one.

    Several sequences of one trajectory are as long as the longest of them.
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
