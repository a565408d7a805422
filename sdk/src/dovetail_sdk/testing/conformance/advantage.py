"""What holds for every advantage estimator."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.batch.columns import glossary
from dovetail.interfaces.advantage import AdvantageEstimator, Advantages, Groups
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.ranks import on_ranks


class AdvantageConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite."""

    kind = "advantage"
    plugin: ClassVar[type[AdvantageEstimator]]
    tolerance: ClassVar[float] = 1e-5
    """Largest difference that counts as rounding."""

    def columns(self, seed: int, groups: int = 5, n: int = 4) -> Batch:
        """A random batch with what the estimator requires: groups × n samples of 1 to 12 tokens."""
        rng = np.random.default_rng(seed)
        size = groups * n
        lengths = rng.integers(1, 13, size)
        mask = Ragged.from_list([rng.random(k) < 0.8 for k in lengths], dtype=np.bool_)
        scores = rng.normal(size=size).astype(np.float32)
        rewards = mask.with_values(np.zeros(len(mask.values), np.float32))
        rewards.values[rewards.offsets[1:] - 1] = scores
        columns: dict[str, Any] = {
            "group_id": np.repeat(np.arange(groups), n),
            "scores": scores,
            "token_rewards": rewards,
            "response_mask": mask,
        }
        for name in self.plugin.requires(self.make_config()) - columns.keys():
            column = glossary(self.plugin.columns)[name]
            columns[name] = (
                rng.normal(size=size).astype(np.float32)
                if column.shape == "dense"
                else mask.with_values(rng.normal(size=len(mask.values)).astype(np.float32))
            )
        return Batch(columns)

    def estimate(self, batch: Batch, **context: Any) -> Advantages:
        """Run the estimator on a batch."""
        result: Advantages = self.make(**context).estimate(batch, Groups.of(batch["group_id"]))
        return result

    def flat(self, batch: Batch, **context: Any) -> list[np.ndarray]:
        """Advantages as one array a sample."""
        advantages = self.estimate(batch, **context).advantages
        if isinstance(advantages, Ragged):
            return list(advantages)
        return [np.atleast_1d(value) for value in advantages]

    @pytest.mark.parametrize("seed", range(3))
    def test_shape_and_dtype_follow_the_level(self, seed: int) -> None:
        batch = self.columns(seed)
        advantages = self.estimate(batch).advantages
        assert advantages.dtype == np.float32
        if self.plugin.level == "sample":
            assert isinstance(advantages, np.ndarray)
            assert advantages.shape == (len(batch),)
        else:
            assert isinstance(advantages, Ragged)
            np.testing.assert_array_equal(advantages.offsets, batch["response_mask"].offsets)

    @pytest.mark.parametrize("seed", range(3))
    def test_the_order_of_samples_does_not_matter(self, seed: int) -> None:
        batch = self.columns(seed)
        order = np.random.default_rng(seed + 100).permutation(len(batch))
        expected = self.flat(batch)
        for row, got in zip(order, self.flat(batch.take(order)), strict=True):
            np.testing.assert_allclose(got, expected[row], atol=self.tolerance)

    def test_equal_rewards_give_finite_advantages(self) -> None:
        batch = self.columns(0)
        equal = batch.with_columns({"scores": np.ones(len(batch), np.float32)})
        assert all(np.isfinite(row).all() for row in self.flat(equal))

    def test_a_group_thinned_to_one_gives_zero(self) -> None:
        if self.plugin.scope != "group":
            pytest.skip("this estimator compares no samples of one prompt")
        batch = self.columns(0, groups=3, n=4)
        thinned = batch.take(np.array([0, 4, 5, 6, 7, 8, 9]))
        np.testing.assert_array_equal(self.flat(thinned)[0], 0.0)

    def test_inputs_are_left_as_they_were(self) -> None:
        batch = self.columns(0)
        before = {n: np.array(getattr(c, "values", c)) for n, c in batch.columns.items()}
        self.estimate(batch)
        for name, column in batch.columns.items():
            np.testing.assert_array_equal(getattr(column, "values", column), before[name])

    def test_two_ranks_with_whole_groups_agree_with_one(self) -> None:
        batch = self.columns(0, groups=6)
        expected = self.flat(batch)
        halves = [batch.slice(0, 8), batch.slice(8, len(batch))]
        parts = on_ranks(2, lambda rank, reduction: self.flat(halves[rank], reduction=reduction))
        for got, want in zip([*parts[0], *parts[1]], expected, strict=True):
            np.testing.assert_allclose(got, want, atol=self.tolerance)
