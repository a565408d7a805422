"""MT-GRPO: adds the advantage of the episode's outcome to each turn's own advantage (arXiv 2505.11821)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from dovetail.batch import Batch
from dovetail.interfaces import Groups
from dovetail_algorithms.config.estimators import MtGrpoConfig
from dovetail_algorithms.estimators.group_baseline import relative_to_group
from dovetail_algorithms.estimators.turns import PolicyTurns, TurnEstimator


class MtGrpoEstimator(TurnEstimator):
    """A_ik = Â(r_iK) + λ Â(r_ik) for turns k < K, A_iK = Â(r_iK), with K the last turn (arXiv 2505.11821).

    Â(x_i) = (x_i − mean_g) / (std_g + 1e-6), with the unbiased standard deviation. The outcome, the reward of the last turn, is compared
    with the last turns of the group; the reward of an earlier turn k with the group's k-th turns that are not the last. A turn without
    another to compare with has only the outcome's advantage. The paper has two turns, a call and an answer, and λ = 1; this estimator
    takes any number of turns.

    Needs at least two episodes a prompt, and rewards for turns (`Session.reward` and the reward function `episode`, or one that
    returns `turn_rewards`); without turn rewards it is GRPO.
    """

    name = "mt_grpo"
    Config = MtGrpoConfig

    def compare(
        self,
        columns: Batch,
        turns: PolicyTurns,
        rewards_U: Float64[np.ndarray, "U"],
        groups: Groups,
    ) -> Float64[np.ndarray, "U"]:
        index_U, episode_U, counts_J = turns.index_U, turns.episode_U, turns.counts_J
        last_U = index_U == counts_J[episode_U] - 1
        outcome_J = np.zeros(len(counts_J))
        outcome_J[episode_U[last_U]] = rewards_U[last_U]
        # An episode without policy tokens has no turn to hold its reward, so its outcome is the score.
        scores_N = np.asarray(columns["scores"], np.float64)
        outcome_N = np.where((counts_J > 0)[turns.episode_N], outcome_J[turns.episode_N], scores_N)
        by_std = self.config.norm_by_std
        advantages_U: np.ndarray = relative_to_group(outcome_N, groups, by_std=by_std)[turns.row_U]
        most = index_U.max(initial=0) + 1
        cells_U = (groups.index_N[turns.row_U] * most + index_U) * 2 + last_U
        own_U = relative_to_group(rewards_U, Groups.of(cells_U), by_std=by_std)
        advantages_U += np.where(last_U, 0.0, self.config.turn_weight * own_U)
        return advantages_U
