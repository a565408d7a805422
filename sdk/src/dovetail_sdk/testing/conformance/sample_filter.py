"""The suite of sample filters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Groups, SampleFilter
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.conformance.random_batches import draw, random_trajectory


class SampleFilterConformance(PluginConformance):
    """Conformance suite for sample filters: subclass it and set `plugin`."""

    kind = "sample_filter"
    plugin: ClassVar[type[SampleFilter]]
    components: ClassVar[tuple[str, ...]] = ("accuracy", "format")
    """Names of the reward components that the samples have."""

    def columns(self, seed: int, groups: int = 6, n: int = 4) -> Batch:
        """Return a random batch of groups × n samples of 1 to 12 tokens, with rewards of 0 and 1, and some groups with equal rewards."""
        rng = np.random.default_rng(seed)
        size = groups * n
        right_share_G = np.resize([0.0, 0.5, 1.0], groups)
        right_N = rng.random(size) < np.repeat(right_share_G, n)
        mask = Ragged.from_list(
            [np.ones(k, bool) for k in rng.integers(1, 13, size)], dtype=np.bool_
        )
        columns: dict[str, Any] = {
            "sample_id": [f"sample-{row}" for row in range(size)],
            "group_id": np.repeat(np.arange(groups), n),
            "trajectory_id": np.arange(size),
            "response_mask": mask,
            "scores": right_N.astype(np.float32),
            "finish_reason": [str(reason) for reason in rng.choice(["stop", "length"], size)],
            "reward_components": [
                {name: float(rng.integers(2)) for name in self.components} for _ in range(size)
            ],
        }
        for name in sorted(self.plugin.requires(self.make_config()) - columns.keys()):
            columns[name] = (
                [random_trajectory(rng) for _ in range(size)]
                if name == "trajectory"
                else draw(self.known_columns()[name], mask, rng)
            )
        return Batch(columns)

    def keep(self, batch: Batch) -> np.ndarray:
        """Run the filter on a batch of N samples and return which samples it keeps, bool [N]."""
        groups = Groups.of(batch["group_id"], batch["trajectory_id"])
        return self.make().keep(batch, groups)

    def test_its_action_is_one_that_the_flow_knows(self) -> None:
        assert self.plugin.action_of(self.make_config()) in ("drop", "mask")

    def test_it_needs_only_what_rollout_and_reward_give(self) -> None:
        known = self.known_columns()
        required = self.plugin.requires(self.make_config())
        later = {
            n: known[n].owner
            for n in required
            if known[n].owner not in ("loader", "rollout", "reward")
        }
        assert not later, f"these columns do not exist yet when filters run: {later}"

    @pytest.mark.parametrize("seed", range(3))
    def test_one_boolean_a_sample(self, seed: int) -> None:
        batch = self.columns(seed)
        kept_N = self.keep(batch)
        assert kept_N.dtype == np.bool_
        assert kept_N.shape == (len(batch),)

    @pytest.mark.parametrize("seed", range(3))
    def test_neither_the_order_of_samples_nor_the_numbers_of_groups_matter(self, seed: int) -> None:
        batch = self.columns(seed)
        order = np.random.default_rng(seed + 100).permutation(len(batch))
        other = batch.take(order)
        other = other.with_columns({"group_id": 7 - 3 * np.asarray(other["group_id"])})
        np.testing.assert_array_equal(self.keep(other), self.keep(batch)[order])

    def test_a_group_is_judged_alike_whatever_the_others_are(self) -> None:
        batch = self.columns(0)
        first = batch.slice(0, 4)
        np.testing.assert_array_equal(self.keep(first), self.keep(batch)[:4])

    def test_inputs_are_left_as_they_were(self) -> None:
        batch = self.columns(0)
        before = deepcopy(batch)
        self.keep(batch)
        assert batch.equals(before)
