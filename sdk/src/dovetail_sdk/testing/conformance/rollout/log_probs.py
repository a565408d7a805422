"""Cases of log-probabilities: of sampled tokens, and of given tokens."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from dovetail.errors import RolloutError
from dovetail.interfaces import BaseRollout
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.conformance.rollout.suite import LONG, PROMPTS, RolloutSuite

DRAWS = 1000
"""Number of single tokens drawn for one prompt, from a vocabulary of 300, to estimate the sum of all tokens' probabilities. The
estimate's standard deviation is 0.013."""


class LogProbCases(RolloutSuite):
    """Tests of log-probabilities against a plain forward pass in float32."""

    def test_log_probs_are_given_only_when_asked_for(self, engine: BaseRollout) -> None:
        for completion in self.generate(engine, self.request(0))["prompt0"]:
            assert completion.log_probs is None
            assert completion.raw_log_probs is None

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_agree_with_a_plain_forward_pass(
        self, engine: BaseRollout, plain: PlainModel, temperature: float
    ) -> None:
        self.needs("logprobs")
        requests = [
            self.request(prompt, n=2, temperature=temperature, log_probs=True)
            for prompt in range(len(PROMPTS))
        ]
        found = self.generate(engine, *requests)
        for prompt in range(len(PROMPTS)):
            for completion in found[f"prompt{prompt}"]:
                self.assert_likely(completion, prompt, plain, temperature)

    def test_the_samples_of_a_group_share_their_prompt_without_effect(
        self, engine: BaseRollout, plain: PlainModel
    ) -> None:
        self.needs("logprobs")
        # The second time the prompt may come from a prefix cache.
        for _ in range(2):
            for completion in self.generate(engine, self.request(LONG, n=4, log_probs=True))[
                f"prompt{LONG}"
            ]:
                self.assert_likely(completion, LONG, plain)

    def test_log_probs_are_those_of_the_truncated_sampler(
        self, engine: BaseRollout, plain: PlainModel
    ) -> None:
        """With `top_k`, the probabilities of the k most likely tokens sum to 1, so each is larger than under the full softmax."""
        self.needs("logprobs")
        for completion in self.generate(engine, self.request(0, n=2, top_k=5, log_probs=True))[
            "prompt0"
        ]:
            full_T = plain.log_probs(PROMPTS[0], completion.response_ids)
            assert completion.log_probs is not None
            assert (completion.log_probs > full_T + 1e-2).all()
        only = self.greedy(engine, 0, temperature=1.0, top_k=1, log_probs=True)
        assert only.log_probs is not None
        np.testing.assert_allclose(only.log_probs, 0.0, atol=self.tolerance)

    def test_tokens_are_drawn_as_likely_as_it_says(self, engine: BaseRollout) -> None:
        """The reported probabilities of the drawn tokens, plus an estimate of the probability of all other tokens, sum to 1.

        The estimate is the share of draws whose token was drawn only once (Good, 1953). The sum is below 1 if the engine truncates
        the distribution and reports log-probabilities of the untruncated distribution.
        """
        self.needs("logprobs")
        request = self.request(0, n=DRAWS, max_new_tokens=1, log_probs=True)
        drawn = self.generate(engine, request)["prompt0"]
        counts = Counter(int(completion.response_ids[0]) for completion in drawn)
        said = {
            int(completion.response_ids[0]): float(np.exp(completion.log_probs[0]))
            for completion in drawn
            if completion.log_probs is not None
        }
        not_drawn = sum(count == 1 for count in counts.values()) / DRAWS
        total = sum(said.values()) + not_drawn
        assert abs(total - 1) < 0.06, (
            f"by `log_probs`, the probabilities of all tokens add up to {total:.2f}; expected 1: the log-probabilities must be those of "
            "the distribution that was sampled from, after any truncation"
        )

    def test_raw_log_probs_ignore_the_truncation(
        self, engine: BaseRollout, plain: PlainModel
    ) -> None:
        self.needs("raw_logprobs")
        request = self.request(0, n=2, top_k=5, log_probs=True, raw_log_probs=True)
        for completion in self.generate(engine, request)["prompt0"]:
            expected_T = plain.log_probs(PROMPTS[0], completion.response_ids)
            assert completion.log_probs is not None
            assert completion.raw_log_probs is not None
            np.testing.assert_allclose(
                completion.raw_log_probs, expected_T, atol=self.tolerance, rtol=0
            )
            assert (completion.log_probs >= completion.raw_log_probs - self.tolerance).all()

    # -- given tokens ------------------------------------------------------------------------

    def test_given_tokens_are_scored_as_by_a_plain_forward_pass(
        self, engine: BaseRollout, plain: PlainModel
    ) -> None:
        self.needs("scores")
        sequences = [
            np.array(ids, dtype=np.int64)
            for ids in ((3, 250), PROMPTS[1], PROMPTS[LONG], (0, 299, 0, 299))
        ]
        # The second time prompts may come from a prefix cache, which has no log-probabilities.
        for _ in range(2):
            scored = asyncio.run(engine.score(sequences))
            assert len(scored) == len(sequences)
            for ids_L, log_probs_L in zip(sequences, scored, strict=True):
                assert log_probs_L.dtype == np.float32
                np.testing.assert_allclose(
                    log_probs_L, plain.score(ids_L), atol=self.tolerance, rtol=0
                )

    def test_nothing_to_score_gives_nothing(self, engine: BaseRollout) -> None:
        self.needs("scores")
        assert asyncio.run(engine.score([])) == []

    def test_given_tokens_are_scored_under_the_weights_in_force(
        self, fresh: BaseRollout, plain: PlainModel, changed: PlainModel
    ) -> None:
        self.needs("scores")
        ids_L = np.array(PROMPTS[LONG], dtype=np.int64)
        for model in (plain, changed, plain):
            self.update(fresh, model)
            (scored_L,) = asyncio.run(fresh.score([ids_L]))
            np.testing.assert_allclose(scored_L, model.score(ids_L), atol=self.tolerance, rtol=0)

    def test_an_engine_that_does_not_score_says_so(self, engine: BaseRollout) -> None:
        if self.claims("scores"):
            pytest.skip(f"{self.plugin.name} scores")
        with pytest.raises(RolloutError, match="score"):
            asyncio.run(engine.score([np.array(PROMPTS[0], dtype=np.int64)]))
