"""Cases of interruption: abort, pause, continue. Generated tokens stay valid, with the weight versions that produced them."""

from __future__ import annotations

import asyncio

import attrs
import numpy as np
import pytest

from dovetail.interfaces import BaseRollout, Completion, FinishReason, PauseMode
from dovetail_sdk.testing.conformance.rollout.interrupting import (
    TIMEOUT,
    begun,
    collected,
    interrupted,
    versions_of,
)
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.conformance.rollout.suite import LONG, PROMPTS, RolloutSuite


class InterruptionCases(RolloutSuite):
    """Tests of abort, pause, resume, and samples that continue under newer weights."""

    def test_an_aborted_request_yields_its_samples_as_far_as_they_came(
        self, engine: BaseRollout
    ) -> None:
        request = self.request(0, n=2, max_new_tokens=self.long_response)
        found = asyncio.run(
            interrupted(engine, request, lambda: engine.abort([request.request_id]), _cut_short)
        )
        assert [c.sample for c in found] == [0, 1]
        assert {c.finish_reason for c in found} == {FinishReason.ABORT}

    def test_aborting_one_request_leaves_the_others_alone(self, engine: BaseRollout) -> None:
        aborted = self.request(0, n=2, max_new_tokens=self.long_response)
        other = self.request(1, n=2, temperature=0.0, max_new_tokens=64)

        async def scenario() -> list[Completion]:
            running = asyncio.create_task(collected(engine, aborted))
            beside = asyncio.create_task(collected(engine, other))
            await begun(engine, other)
            await engine.abort([aborted.request_id, "an unknown request"])
            found = await asyncio.wait_for(beside, TIMEOUT)
            await asyncio.wait_for(running, TIMEOUT)
            return found

        alone = self.generate(engine, other)["prompt1"]
        for completion, expected in zip(asyncio.run(scenario()), alone, strict=True):
            np.testing.assert_array_equal(completion.response_ids, expected.response_ids)
            assert completion.finish_reason == FinishReason.LENGTH

    # -- pause -------------------------------------------------------------------------------

    def test_a_pause_that_waits_lets_running_requests_finish_and_starts_none(
        self, fresh: BaseRollout
    ) -> None:
        request = self.request(0, n=2, max_new_tokens=64)
        later = self.request(1, n=1)

        async def scenario() -> tuple[list[Completion], list[Completion]]:
            running = asyncio.create_task(collected(fresh, request))
            await begun(fresh, request)
            await asyncio.wait_for(fresh.pause(PauseMode.WAIT), TIMEOUT)
            found = await asyncio.wait_for(running, TIMEOUT)
            waiting = asyncio.create_task(collected(fresh, later))
            await asyncio.wait({waiting}, timeout=0.2)
            assert not waiting.done()
            await fresh.resume()
            return found, await asyncio.wait_for(waiting, TIMEOUT)

        found, afterwards = asyncio.run(scenario())
        assert [len(c.response_ids) for c in found] == [64, 64]
        assert {c.finish_reason for c in (*found, *afterwards)} == {FinishReason.LENGTH}

    def test_a_pause_that_aborts_ends_running_requests(self, fresh: BaseRollout) -> None:
        async def pause() -> None:
            await asyncio.wait_for(fresh.pause(PauseMode.ABORT), TIMEOUT)
            await fresh.resume()

        request = self.request(0, n=2, max_new_tokens=self.long_response)
        found = asyncio.run(interrupted(fresh, request, pause, _cut_short))
        assert {c.finish_reason for c in found} == {FinishReason.ABORT}
        (again,) = self.generate(fresh, self.request(0, n=1))["prompt0"]
        assert again.finish_reason == FinishReason.LENGTH

    def test_a_pause_that_keeps_requests_changes_nothing_in_them(self, fresh: BaseRollout) -> None:
        length = min(200, self.long_response)
        request = self.request(0, n=2, temperature=0.0, max_new_tokens=length)
        undisturbed = self.generate(fresh, request)["prompt0"]

        async def scenario() -> list[Completion]:
            running = asyncio.create_task(collected(fresh, request))
            await begun(fresh, request)
            await asyncio.wait_for(fresh.pause(PauseMode.KEEP), TIMEOUT)
            await fresh.resume()
            return await asyncio.wait_for(running, TIMEOUT)

        for completion, expected in zip(asyncio.run(scenario()), undisturbed, strict=True):
            np.testing.assert_array_equal(completion.response_ids, expected.response_ids)
            np.testing.assert_array_equal(completion.weight_versions, expected.weight_versions)
            assert completion.finish_reason == FinishReason.LENGTH

    # -- under newer weights -----------------------------------------------------------------

    def test_requests_that_are_kept_over_an_update_go_on_under_the_new_weights(
        self, fresh: BaseRollout, plain: PlainModel, changed: PlainModel
    ) -> None:
        """A token's log-probability must be that of its weight version given all earlier tokens, so the engine must recompute keys and
        values of earlier tokens after an update.
        """
        models = {self.version_of(fresh): plain}

        async def update() -> None:
            await asyncio.wait_for(fresh.pause(PauseMode.KEEP), TIMEOUT)
            model = plain if list(models.values())[-1] is changed else changed
            models[await asyncio.to_thread(self.update, fresh, model)] = model
            await fresh.resume()

        length = min(400, self.long_response)
        request = self.request(0, n=2, max_new_tokens=length, log_probs=self.claims("logprobs"))
        found = asyncio.run(
            interrupted(
                fresh, request, update, lambda found: all(len(versions_of(c)) > 1 for c in found)
            )
        )
        for completion in found:
            assert completion.finish_reason == FinishReason.LENGTH
            assert len(completion.response_ids) == length
            assert (np.diff(completion.weight_versions) >= 0).all()
            self.assert_likely_by_version(completion, 0, models)

    def test_requests_whose_cache_is_kept_over_an_update_go_on_with_the_keys_and_values_of_old_weights(
        self, fresh: BaseRollout, plain: PlainModel, changed: PlainModel
    ) -> None:
        """A running request continues with its old KV cache. A request that begins after the update must not use it, although its prompt is
        the same.
        """
        self.needs("keeps_cache")
        why = self.make_config().cache_problem()
        if why is not None:
            pytest.skip(f"with this config, the engine {why}")
        models = {self.version_of(fresh): plain}
        later = self.request(LONG, n=1, max_new_tokens=4, log_probs=self.claims("logprobs"))
        afterwards: list[Completion] = []

        async def update() -> None:
            await asyncio.wait_for(fresh.pause(PauseMode.KEEP_CACHE), TIMEOUT)
            model = plain if list(models.values())[-1] is changed else changed
            models[await asyncio.to_thread(self.send_model, fresh, model)] = model
            await fresh.resume()
            afterwards[:] = await asyncio.wait_for(
                collected(fresh, attrs.evolve(later, request_id="later")), TIMEOUT
            )

        request = self.request(
            LONG,
            n=2,
            max_new_tokens=min(400, self.long_response),
            log_probs=self.claims("logprobs"),
        )
        found = asyncio.run(
            interrupted(
                fresh, request, update, lambda found: all(len(versions_of(c)) > 1 for c in found)
            )
        )
        for completion in found:
            assert completion.finish_reason == FinishReason.LENGTH
            assert (np.diff(completion.weight_versions) >= 0).all()
            assert versions_of(completion).keys() <= models.keys()
            expected_T = PlainModel.kept_log_probs(
                models, PROMPTS[LONG], completion.response_ids, completion.weight_versions
            )
            assert completion.log_probs is not None
            np.testing.assert_allclose(
                completion.log_probs, expected_T, atol=self.tolerance, rtol=0
            )
        assert list(versions_of(afterwards[0])) == [max(models)]
        self.assert_likely_by_version(afterwards[0], LONG, models)

    def test_an_aborted_sample_is_continued_under_newer_weights(
        self, fresh: BaseRollout, plain: PlainModel, changed: PlainModel
    ) -> None:
        first = self.version_of(fresh)
        request = self.request(
            1, n=1, max_new_tokens=self.long_response, log_probs=self.claims("logprobs")
        )
        (partial,) = asyncio.run(
            interrupted(fresh, request, lambda: fresh.abort([request.request_id]), _cut_short)
        )
        assert versions_of(partial) == {first: len(partial.response_ids)}
        second = self.update(fresh, changed)
        rest_of_it = attrs.evolve(
            request,
            request_id="the rest",
            prompt_ids=np.concatenate([request.prompt_ids, partial.response_ids]),
            streams=tuple(
                attrs.evolve(stream, offset=len(partial.response_ids)) for stream in request.streams
            ),
            sampling=attrs.evolve(request.sampling, max_new_tokens=8),
        )
        (rest,) = self.generate(fresh, rest_of_it)["the rest"]
        whole = rest.after(partial)
        assert (whole.request_id, whole.sample) == (request.request_id, 0)
        assert whole.finish_reason == FinishReason.LENGTH
        np.testing.assert_array_equal(
            whole.response_ids, [*partial.response_ids, *rest.response_ids]
        )
        assert versions_of(whole) == {first: len(partial.response_ids), second: 8}
        self.assert_likely_by_version(whole, 1, {first: plain, second: changed})

    def version_of(self, engine: BaseRollout) -> int:
        """Return the version of the weights with which the engine currently generates."""
        (version,) = versions_of(self.greedy(engine))
        return version

    def assert_likely_by_version(
        self, completion: Completion, prompt: int, models: dict[int, PlainModel]
    ) -> None:
        """Assert that each token's log-probability matches the model of the token's weight version."""
        assert versions_of(completion).keys() <= models.keys()
        if not self.claims("logprobs"):
            return
        assert completion.log_probs is not None
        for version in versions_of(completion):
            expected_T = models[version].log_probs(PROMPTS[prompt], completion.response_ids)
            its_own_T = completion.weight_versions == version
            np.testing.assert_allclose(
                completion.log_probs[its_own_T], expected_T[its_own_T], atol=self.tolerance, rtol=0
            )


def _cut_short(found: list[Completion]) -> bool:
    """Return whether every sample was aborted with at least one token generated."""
    return all(c.finish_reason == FinishReason.ABORT and len(c.response_ids) for c in found)
