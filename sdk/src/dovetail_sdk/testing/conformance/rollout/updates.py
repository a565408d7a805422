"""Cases of new weights: a complete update is used at once, and an engine never generates with a mixture of old and new weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dovetail.errors import DovetailError
from dovetail.interfaces import BaseRollout, Completion
from dovetail_sdk.testing.conformance.rollout.interrupting import versions_of
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.conformance.rollout.suite import LONG, PROMPTS, RolloutSuite


class UpdateCases(RolloutSuite):
    """Tests of complete and partial updates."""

    @pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
    def test_new_weights_arrive_and_are_versioned(
        self, fresh: BaseRollout, plain: PlainModel, changed: PlainModel, bucket_bytes: int
    ) -> None:
        for model in (changed, plain):
            version = self.update(fresh, model, bucket_bytes=bucket_bytes)
            for prompt in (1, LONG):
                self.assert_greedy_is(self.greedy(fresh, prompt), prompt, model, version)

    def test_what_was_cached_under_old_weights_is_not_used_under_new_ones(
        self, fresh: BaseRollout, changed: PlainModel
    ) -> None:
        self.generate(fresh, self.request(LONG, n=2))
        version = self.update(fresh, changed)
        self.assert_greedy_is(self.greedy(fresh, LONG), LONG, changed, version)

    @pytest.mark.parametrize("fault", ["breaks off", "lacks a tensor", "names another"])
    def test_a_torn_update_never_leaves_mixed_weights(
        self, fresh: BaseRollout, changed: PlainModel, fault: str
    ) -> None:
        """After a failed update the engine keeps the old weights, or refuses every request until a complete update has arrived."""
        before = self.greedy(fresh, 1)
        with pytest.raises(DovetailError):
            self.torn_update(fresh, changed, fault)
        try:
            after = self.greedy(fresh, 1)
        except DovetailError:
            self.assert_everything_is_refused(fresh)
        else:
            np.testing.assert_array_equal(after.response_ids, before.response_ids)
            np.testing.assert_array_equal(after.weight_versions, before.weight_versions)
            if before.log_probs is not None and after.log_probs is not None:
                np.testing.assert_allclose(after.log_probs, before.log_probs, atol=self.tolerance)
        version = self.update(fresh, changed)
        self.assert_greedy_is(self.greedy(fresh, 1), 1, changed, version)

    def assert_everything_is_refused(self, engine: BaseRollout) -> None:
        """Assert that the engine refuses every request."""
        for prompt in range(len(PROMPTS)):
            with pytest.raises(DovetailError):
                self.generate(engine, self.request(prompt, n=1))
        if self.claims("scores"):
            with pytest.raises(DovetailError):
                asyncio.run(engine.score([np.array(PROMPTS[0], dtype=np.int64)]))

    def assert_greedy_is(
        self, completion: Completion, prompt: int, model: PlainModel, version: int
    ) -> None:
        """Assert that the completion is the model's greedy response and that every token has this weight version."""
        count = len(completion.response_ids)
        self.assert_greedy(completion, prompt, model)
        assert versions_of(completion) == {version: count}
