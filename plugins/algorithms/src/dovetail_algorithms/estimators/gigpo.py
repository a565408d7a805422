"""GiGPO: compares episodes within their group, and turns with the group's turns that began in the same state (arXiv 2505.10978)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64

from dovetail.batch import Batch
from dovetail.interfaces import Groups
from dovetail_algorithms.config.estimators import GigpoConfig
from dovetail_algorithms.estimators.group_baseline import relative_to_group
from dovetail_algorithms.estimators.turns import PolicyTurns, TurnEstimator


class GigpoEstimator(TurnEstimator):
    """A_ik = Â_g(R_i) + ω Â_s(G_ik), G_ik = r_ik + γ G_i(k+1) (group-in-group policy optimization, arXiv 2505.10978).

    Â(x_i) = (x_i − mean) / (std + 1e-6), with the unbiased standard deviation. Â_g is over the episode rewards R_i of the group; Â_s is
    over the discounted returns G_ik of all turns of the group that began in the same state s, the anchor state. A state is the text that
    the policy was shown last, token for token; before a sequence's first turn it is the prompt. A turn whose state is unique in the group
    has Â_s = 0. Use GiGPO if episodes of a prompt reach the same states repeatedly, as in games, web pages and forms; if they never do,
    it equals GRPO. `norm_by_std: false` omits the division, as the paper proposes for tasks that differ much in difficulty.

    Needs at least two episodes a prompt, and no value model.
    """

    name = "gigpo"
    Config = GigpoConfig
    columns_read = frozenset({"prompt_ids", "response_ids"})

    def compare(
        self,
        columns: Batch,
        turns: PolicyTurns,
        rewards_U: Float64[np.ndarray, "U"],
        groups: Groups,
    ) -> Float64[np.ndarray, "U"]:
        by_std = self.config.norm_by_std
        scores_N = np.asarray(columns["scores"], np.float64)
        episodes_N = relative_to_group(scores_N, groups, by_std=by_std)
        returns_U = turns.discounted_sums(rewards_U, self.config.gamma)
        anchors = Groups.of(anchor_states(columns, turns, groups))
        steps_U = relative_to_group(returns_U, anchors, by_std=by_std)
        return episodes_N[turns.row_U] + self.config.step_weight * steps_U


def anchor_states(columns: Batch, turns: PolicyTurns, groups: Groups) -> Int64[np.ndarray, "U"]:
    """Return an id of the anchor state in which each of the U turns begins, int64 [U].

    Two turns have the same id if they belong to the same group and the tokens shown before them are equal.

    Args:
        columns: `prompt_ids` and `response_ids`, ragged int64.
        turns: the turns of the sequences.
        groups: the groups of the sequences.
    """
    prompts, responses = columns["prompt_ids"], columns["response_ids"]
    begin_U = turns.own.place_K[turns.first_U]
    end_U = turns.own.place_K[turns.last_U] + 1
    numbers: dict[tuple[int, bytes], int] = {}
    states_U = np.zeros(len(begin_U), np.int64)
    for turn, row in enumerate(turns.row_U.tolist()):
        opens = turn == 0 or turns.row_U[turn - 1] != row
        shown = prompts[row] if opens else responses.values[end_U[turn - 1] : begin_U[turn]]
        key = (int(groups.index_N[row]), shown.tobytes())
        states_U[turn] = numbers.setdefault(key, len(numbers))
    return states_U
