"""Cases of generation: every requested sample arrives once, and depends on nothing but its request."""

from __future__ import annotations

import attrs
import numpy as np

from dovetail.interfaces import BaseRollout, FinishReason
from dovetail.metrics import Metric, Sum, merge_metrics, values
from dovetail_sdk.testing.conformance.rollout.suite import LONG, PROMPTS, RolloutSuite


class GenerationCases(RolloutSuite):
    """Tests of generated samples: their number, stop tokens, greedy and random sampling, independence, and the engine's metrics."""

    def test_every_sample_arrives_once_and_within_the_limit(self, engine: BaseRollout) -> None:
        found = self.generate(engine, *(self.request(p, n=3) for p in range(len(PROMPTS))))
        for completions in found.values():
            assert [c.sample for c in completions] == [0, 1, 2]
            for completion in completions:
                assert completion.response_ids.dtype == np.int64
                assert len(completion.response_ids) == 8
                assert completion.finish_reason == FinishReason.LENGTH
                assert completion.weight_versions.dtype == np.int64
                assert completion.weight_versions.shape == completion.response_ids.shape

    def test_an_engine_that_answers_is_alive(self, engine: BaseRollout) -> None:
        self.generate(engine, self.request(0, n=1))
        assert engine.alive()

    def test_a_stop_token_ends_a_response_and_is_part_of_it(self, engine: BaseRollout) -> None:
        free = self.greedy(engine, 0)
        stop = int(free.response_ids[3])
        end = int(np.flatnonzero(free.response_ids == stop)[0]) + 1
        stopped = self.greedy(engine, 0, stop_token_ids=(stop,))
        np.testing.assert_array_equal(stopped.response_ids, free.response_ids[:end])
        assert stopped.finish_reason == FinishReason.STOP

    def test_greedy_samples_of_one_prompt_are_equal(self, engine: BaseRollout) -> None:
        first, *others = self.generate(engine, self.request(1, temperature=0.0))["prompt1"]
        for other in others:
            np.testing.assert_array_equal(other.response_ids, first.response_ids)

    def test_samples_of_one_prompt_differ(self, engine: BaseRollout) -> None:
        found = self.generate(engine, self.request(0, n=8))["prompt0"]
        assert len({tuple(c.response_ids.tolist()) for c in found}) > 1

    def test_a_prompt_that_is_known_already_is_answered_as_if_it_were_new(
        self, engine: BaseRollout
    ) -> None:
        request = self.request(LONG, n=4, temperature=0.0)
        again = attrs.evolve(request, request_id="again")
        cold = self.generate(engine, request)["prompt3"]
        warm = self.generate(engine, request, again)
        for completion in (*warm["prompt3"], *warm["again"]):
            np.testing.assert_array_equal(completion.response_ids, cold[0].response_ids)

    # -- seeds -------------------------------------------------------------------------------

    def test_a_sample_does_not_depend_on_its_batch_mates(self, engine: BaseRollout) -> None:
        self.needs("per_sample_seed")
        crowd = self.generate(engine, *(self.request(p) for p in range(len(PROMPTS))))
        for prompt in range(len(PROMPTS)):
            alone = self.generate(engine, self.request(prompt, n=1))[f"prompt{prompt}"][0]
            np.testing.assert_array_equal(
                alone.response_ids, crowd[f"prompt{prompt}"][0].response_ids
            )

    def test_a_continued_sample_goes_on_as_if_never_cut(self, engine: BaseRollout) -> None:
        """Submit a sample's first 3 tokens as part of the prompt, with the stream's offset 3: the remaining tokens are the same.

        This holds for engines whose random draw of a token depends only on the stream and its offset.
        """
        self.needs("deterministic")
        self.needs("per_sample_seed")
        whole = self.generate(engine, self.request(0, n=1))["prompt0"][0]
        first = self.request(0, n=1)
        continued = attrs.evolve(
            first,
            prompt_ids=np.concatenate([first.prompt_ids, whole.response_ids[:3]]),
            streams=tuple(attrs.evolve(stream, offset=3) for stream in first.streams),
            sampling=attrs.evolve(first.sampling, max_new_tokens=5),
        )
        rest = self.generate(engine, continued)["prompt0"][0]
        np.testing.assert_array_equal(rest.response_ids, whole.response_ids[3:])

    # -- figures -----------------------------------------------------------------------------

    def test_figures_are_finite_and_merge_over_replicas(self, engine: BaseRollout) -> None:
        parts = []
        for _ in range(2):
            self.generate(engine, self.request(0))
            parts.append(dict(engine.metrics()))
        for part in parts:
            assert all(name.startswith("rollout/") for name in part), sorted(part)
            assert all(isinstance(metric, Metric) for metric in part.values())
            assert np.isfinite(list(values(part).values())).all(), values(part)
        merged = merge_metrics(parts)
        assert merged.keys() == parts[0].keys() | parts[1].keys()
        assert np.isfinite(list(values(merged).values())).all(), values(merged)

    def test_figures_tell_what_was_done_since_they_were_last_asked_for(
        self, engine: BaseRollout
    ) -> None:
        self.generate(engine, self.request(0))
        engine.metrics()
        idle = engine.metrics()
        sums = {name: metric.value for name, metric in idle.items() if isinstance(metric, Sum)}
        assert not any(sums.values()), sums
