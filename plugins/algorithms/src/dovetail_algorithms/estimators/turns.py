"""Helpers of the estimators over turns. T tokens, K of them the policy's own, U turns, N sequences, J episodes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import attrs
import numpy as np
from jaxtyping import Float64, Int64

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Advantages, Groups, PluginConfig
from dovetail_algorithms.estimators.group_baseline import group_metrics
from dovetail_algorithms.estimators.token_level import PolicyTokens, TokenEstimator, discounted_sums


@attrs.frozen(eq=False)
class PolicyTurns:
    """The turns of every sequence, in order. A turn is a series of consecutive policy tokens with the same value in `turn_ids`.

    Attributes:
        own: the policy's K tokens.
        first_U: int64 [U], the index of each turn's first token among the policy's K tokens.
        row_U: int64 [U], the index of the sequence that contains each turn.
        number_U: int64 [U], the value of `turn_ids` in each turn, which orders the turns of an episode.
        episode_N: int64 [N], the index of the episode to which each sequence belongs.
    """

    own: PolicyTokens
    first_U: Int64[np.ndarray, "U"]
    row_U: Int64[np.ndarray, "U"]
    number_U: Int64[np.ndarray, "U"]
    episode_N: Int64[np.ndarray, "N"]

    @classmethod
    def of(cls, own: PolicyTokens, turn_ids: Ragged, groups: Groups | None = None) -> PolicyTurns:
        """Return the policy's turns.

        Args:
            own: the policy's tokens.
            turn_ids: the column `turn_ids`, int64, ragged [T].
            groups: the groups, whose `trajectory_N` gives the episode of each sequence. Without groups, or if `trajectory_N` is None, each
                sequence is an episode.
        """
        ids_K = turn_ids.values[own.place_K]
        row_K = np.repeat(np.arange(len(own.lengths_N)), own.lengths_N)
        begins_K = np.ones(len(ids_K), np.bool_)
        begins_K[1:] = (np.diff(ids_K) != 0) | (np.diff(row_K) != 0)
        first_U = np.flatnonzero(begins_K)
        episode_N = None if groups is None else groups.trajectory_N
        if episode_N is None:
            episode_N = np.arange(len(own.lengths_N))
        return cls(own, first_U, row_K[first_U], ids_K[first_U], episode_N)

    @property
    def lengths_U(self) -> Int64[np.ndarray, "U"]:
        """The number of tokens of each turn, int64 [U]."""
        return np.diff(self.first_U, append=len(self.own.place_K))

    @property
    def last_U(self) -> Int64[np.ndarray, "U"]:
        """The index of each turn's last token among the policy's K tokens, int64 [U]."""
        return self.first_U + self.lengths_U - 1

    @property
    def episode_U(self) -> Int64[np.ndarray, "U"]:
        """The index of the episode to which each turn belongs, int64 [U]."""
        return self.episode_N[self.row_U]

    @property
    def counts_J(self) -> Int64[np.ndarray, "J"]:
        """The number of turns of each episode, int64 [J]."""
        return np.bincount(self.episode_U, minlength=self.episode_N.max(initial=-1) + 1)

    @property
    def order_U(self) -> Int64[np.ndarray, "U"]:
        """Indices that sort the turns by episode, and by order within the episode, int64 [U]."""
        return np.lexsort((self.number_U, self.episode_U))

    @property
    def index_U(self) -> Int64[np.ndarray, "U"]:
        """The index of each turn within its episode, from 0, int64 [U]."""
        counts_J, index_U = self.counts_J, np.zeros(len(self.row_U), np.int64)
        begin_J = np.cumsum(counts_J) - counts_J
        index_U[self.order_U] = np.arange(len(index_U)) - np.repeat(begin_J, counts_J)
        return index_U

    def discounted_sums(
        self, values_U: Float64[np.ndarray, "U"], decay: float
    ) -> Float64[np.ndarray, "U"]:
        """Compute S_k = x_k + decay · S_{k+1} over the turns of each episode, float64 [U]."""
        order_U, sums_U = self.order_U, np.zeros(len(values_U))
        sums_U[order_U] = discounted_sums(values_U[order_U], self.counts_J, decay)
        return sums_U

    def sums(self, values_K: Float64[np.ndarray, "K"]) -> Float64[np.ndarray, "U"]:
        """Sum the values of each turn's tokens, float64 [U]."""
        if not len(self.first_U):
            return np.zeros(0)
        return np.add.reduceat(values_K, self.first_U)


def decay_over_turns(
    own: PolicyTokens, columns: Batch, gamma: float, turn_gamma: float | None
) -> float | Float64[np.ndarray, "K"]:
    """Return the discount from each token to the next, float64 [K]: `turn_gamma` from a turn's last token, else `gamma`. Without
    `turn_gamma`, a scalar.
    """
    if turn_gamma is None:
        return gamma
    decay_K = np.full(len(own.place_K), gamma)
    decay_K[PolicyTurns.of(own, columns["turn_ids"]).last_U] = turn_gamma
    return decay_K


class TurnEstimator(TokenEstimator):
    """An estimator that compares turns within a group; all tokens of a turn have one advantage.

    The turns of an episode form one series, even if the agent loop split the episode into several sequences. A group of one trajectory has
    advantages of 0, and a metric counts such groups.
    """

    capabilities = frozenset({"deterministic", "several_sequences"})
    scope = "group"
    columns_read: ClassVar[frozenset[str]] = frozenset()
    """Columns that the estimator requires besides `scores`, `token_rewards`, `response_mask` and `turn_ids`."""

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        needed = frozenset({"scores", "token_rewards", "response_mask", "turn_ids"})
        return needed | cls.columns_read

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"advantages"})

    @classmethod
    def min_group_size(cls, config: PluginConfig) -> int:
        return 2

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        own = self.policy_tokens(columns)
        turns = PolicyTurns.of(own, columns["turn_ids"], groups)
        rewards_U = turns.sums(own.take(columns["token_rewards"]))
        compared_U = (groups.sizes_G > 1)[groups.index_N][turns.row_U]
        advantages_U = np.where(compared_U, self.compare(columns, turns, rewards_U, groups), 0.0)
        signal_N = np.bincount(turns.row_U, np.abs(advantages_U), len(own.lengths_N))
        return Advantages(
            advantages=own.column(np.repeat(advantages_U, turns.lengths_U)),
            metrics=group_metrics(signal_N, groups),
        )

    @abstractmethod
    def compare(
        self,
        columns: Batch,
        turns: PolicyTurns,
        rewards_U: Float64[np.ndarray, "U"],
        groups: Groups,
    ) -> Float64[np.ndarray, "U"]:
        """Return advantages of the turns, float64 [U], from the sums of their rewards and the columns in `columns_read`."""
