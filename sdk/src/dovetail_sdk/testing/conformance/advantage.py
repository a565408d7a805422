"""The suite of advantage estimators."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import AdvantageEstimator, Advantages, Groups
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.conformance.random_batches import (
    random_batch,
    with_scores,
    without_tokens,
)
from dovetail_sdk.testing.ranks import on_ranks


class AdvantageConformance(PluginConformance):
    """Conformance suite for advantage estimators: subclass it and set `plugin`."""

    kind = "advantage"
    plugin: ClassVar[type[AdvantageEstimator]]
    tolerance: ClassVar[float] = 1e-5
    """Largest difference that counts as rounding."""
    component_names: ClassVar[tuple[str, ...]] = ("accuracy", "format")
    """Names of the reward components of every sample."""

    def columns(self, seed: int, groups: int = 5, n: int = 4) -> Batch:
        """Return a random batch with the columns that the estimator requires: groups × n samples of 0 to 12 tokens."""
        return random_batch(
            self.plugin.requires(self.make_config()),
            seed=seed,
            groups=groups,
            n=n,
            declared=tuple(self.known_columns().values()),
            component_names=self.component_names,
        )

    def compares_groups(self) -> bool:
        """Return whether a sample's advantage depends on the other samples of the same prompt."""
        least = self.plugin.min_group_size(self.make_config())
        return self.plugin.scope == "group" or least >= 2

    def estimate(self, batch: Batch, **context: Any) -> Advantages:
        """Run the estimator on a batch. `context` holds fields of the plugin's `PluginContext`."""
        trajectories = batch.columns.get("trajectory_id")
        groups = Groups.of(batch["group_id"], trajectories)
        return self.make(**context).estimate(batch, groups)

    def flat(self, batch: Batch, **context: Any) -> list[np.ndarray]:
        """Estimate advantages as `estimate` does, and return one array per sample: [1], or [t] if advantages are per token."""
        advantages = self.estimate(batch, **context).advantages
        if isinstance(advantages, Ragged):
            return list(advantages)
        return [np.atleast_1d(value) for value in advantages]

    def assert_close(self, got: list[np.ndarray], expected: list[np.ndarray]) -> None:
        """Assert that two lists of arrays, [1] or [t] per sample, agree within the tolerance."""
        for mine, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=self.tolerance, atol=self.tolerance)

    # Shapes

    @pytest.mark.parametrize("seed", range(3))
    def test_shape_and_dtype_follow_the_level(self, seed: int) -> None:
        batch = self.columns(seed)
        result = self.estimate(batch)
        for column in (result.advantages, result.returns):
            if column is None:
                continue
            assert column.dtype == np.float32
            if self.plugin.level == "sample":
                assert isinstance(column, np.ndarray)
                assert column.shape == (len(batch),)
            else:
                assert isinstance(column, Ragged)
                np.testing.assert_array_equal(column.offsets, batch["response_mask"].offsets)

    @pytest.mark.parametrize("seed", range(3))
    def test_tokens_that_the_policy_did_not_write_hold_0(self, seed: int) -> None:
        batch = self.columns(seed)
        result = self.estimate(batch)
        for column in (result.advantages, result.returns):
            if isinstance(column, Ragged):
                np.testing.assert_array_equal(column.values[~batch["response_mask"].values], 0.0)

    def test_returns_come_where_they_are_promised(self) -> None:
        provided = self.plugin.provides(self.make_config())
        result = self.estimate(self.columns(0))
        assert ("returns" in provided) == (result.returns is not None)

    def test_inputs_are_left_as_they_were(self) -> None:
        batch = self.columns(0)
        before = deepcopy(batch)
        self.estimate(batch)
        assert batch.equals(before)

    # Hard cases

    @pytest.mark.parametrize(
        "scale", [1e-30, 1e30], ids=["next to no reward", "rewards next to overflow"]
    )
    def test_extreme_rewards_give_finite_advantages(self, scale: float) -> None:
        batch = self.columns(0)
        scores_N = np.where(np.arange(len(batch)) % 3, scale, -1.0).astype(np.float32)
        self.assert_finite(with_scores(batch, scores_N))

    def test_equal_rewards_give_finite_advantages(self) -> None:
        batch = self.columns(0)
        self.assert_finite(with_scores(batch, np.full(len(batch), 0.1, np.float32)))

    def test_a_batch_without_a_token_of_the_policy_gives_finite_advantages(self) -> None:
        batch = self.columns(0)
        mask = batch["response_mask"]
        self.assert_finite(
            batch.with_columns({"response_mask": mask.with_values(np.zeros_like(mask.values))})
        )

    def test_a_batch_of_empty_responses_gives_finite_advantages(self) -> None:
        self.assert_finite(without_tokens(self.columns(0)))

    def assert_finite(self, batch: Batch) -> None:
        """Assert that no advantage, return or metric is NaN or infinite."""
        result = self.estimate(batch)
        for column in (result.advantages, result.returns):
            if column is not None:
                values = column.values if isinstance(column, Ragged) else column
                assert np.isfinite(values).all()
        assert np.isfinite(list(result.metrics.values())).all()

    # Invariances

    @pytest.mark.parametrize("seed", range(3))
    def test_the_order_of_samples_does_not_matter(self, seed: int) -> None:
        batch = self.columns(seed)
        order = np.random.default_rng(seed + 100).permutation(len(batch))
        expected = self.flat(batch)
        self.assert_close(self.flat(batch.take(order)), [expected[row] for row in order])

    def test_two_ranks_with_whole_groups_agree_with_one(self) -> None:
        batch = self.columns(0, groups=6)
        halves = [batch.slice(0, 8), batch.slice(8, len(batch))]
        parts = on_ranks(2, lambda rank, reduction: self.flat(halves[rank], reduction=reduction))
        self.assert_close([*parts[0], *parts[1]], self.flat(batch))

    def test_nothing_beyond_the_scope_matters(self) -> None:
        batch = self.columns(0, groups=3)
        units = {"sample": 1, "group": len(batch) // 3, "batch": len(batch)}
        size = units[self.plugin.scope]
        parts = [batch.slice(at, at + size) for at in range(0, len(batch), size)]
        self.assert_close([row for part in parts for row in self.flat(part)], self.flat(batch))

    def test_a_group_thinned_to_one_gives_zero(self) -> None:
        if not self.compares_groups():
            pytest.skip("the estimator does not compare the samples of a prompt")
        batch = self.columns(0, groups=3, n=4)
        thinned = batch.take(np.array([0, 4, 5, 6, 7, 8, 9]))
        np.testing.assert_array_equal(self.flat(thinned)[0], 0.0)
        # An estimator that counts groups of one sample must count this group.
        assert self.estimate(thinned).metrics.get("advantage/singleton_groups", 1) == 1

    def test_a_trajectory_of_two_sequences_counts_once(self) -> None:
        if not self.compares_groups():
            pytest.skip("the estimator does not compare the samples of a prompt")
        if self.plugin.level == "token" and "several_sequences" in self.plugin.capabilities:
            pytest.skip("two rows with the same tokens are not sequences of one trajectory")
        batch = self.columns(0, groups=3, n=4)
        expected = self.flat(batch)
        if self.plugin.level == "sample":
            got = self.flat(_cut_in_two(batch, 1))
        else:
            # Positions in a response matter, so the two sequences are copies of one and not its halves.
            rows = np.insert(np.arange(len(batch)), 1, 1)
            got = self.flat(batch.take(rows).with_columns({"trajectory_id": rows}))
        self.assert_close(got, [*expected[:2], *expected[1:]])


def _cut_in_two(batch: Batch, row: int) -> Batch:
    """Return the batch with one sample divided into two sequences of a trajectory, each with the sample's score."""
    rows = np.insert(np.arange(len(batch)), row, row)
    columns: dict[str, Any] = {"trajectory_id": rows}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            cut = len(column[row]) // 2
            parts = [*column]
            parts[row : row + 1] = [parts[row][:cut], parts[row][cut:]]
            columns[name] = Ragged.from_list(parts, dtype=column.dtype)
    return batch.take(rows).with_columns(columns)
