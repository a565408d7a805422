"""Cases of sleep and wake: memory is freed, and generated tokens do not change."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from dovetail.interfaces import BaseRollout
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.conformance.rollout.suite import LONG, RolloutSuite

ALL = frozenset({"weights", "kv_cache"})


class MemoryCases(RolloutSuite):
    """Tests of the capability `sleep`."""

    @pytest.mark.parametrize("tags", [ALL, frozenset({"kv_cache"})], ids=["all", "kv_cache"])
    def test_after_sleep_and_wake_it_generates_exactly_as_before(
        self, fresh: BaseRollout, tags: frozenset[str]
    ) -> None:
        self.needs("sleep")
        before = self.greedy(fresh, LONG)
        freed = fresh.sleep(tags)
        assert freed >= 0
        if torch.device(self.device).type != "cpu" and "weights" in tags:
            assert freed > 0
        fresh.wake(tags)
        asyncio.run(fresh.reset_cache())
        after = self.greedy(fresh, LONG)
        np.testing.assert_array_equal(after.response_ids, before.response_ids)
        np.testing.assert_array_equal(after.weight_versions, before.weight_versions)
        if before.log_probs is not None and after.log_probs is not None:
            np.testing.assert_array_equal(after.log_probs, before.log_probs)

    @pytest.mark.parametrize("keep_weights", [True, False])
    def test_new_weights_arrive_while_the_kv_cache_still_sleeps(
        self, fresh: BaseRollout, changed: PlainModel, keep_weights: bool
    ) -> None:
        """The weights wake first, are updated, and then the KV cache wakes, as in a run whose trainer and rollout take turns on one GPU."""
        self.needs("sleep")
        if not keep_weights:
            self.needs("discards_weights")
        self.generate(fresh, self.request(LONG, n=2))
        fresh.sleep(ALL, keep_weights=keep_weights)
        fresh.wake(frozenset({"weights"}))
        version = self.send_model(fresh, changed)
        fresh.wake(frozenset({"kv_cache"}))
        asyncio.run(fresh.reset_cache())
        completion = self.greedy(fresh, LONG)
        self.assert_greedy(completion, LONG, changed)
        assert set(completion.weight_versions.tolist()) == {version}
