"""Interrupted responses continue from their tokens: after a checkpoint, new weights, a sleep of replicas, or a stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import StopRequested
from dovetail.interfaces import Completion, FinishReason, Prompt, RolloutRequest, SamplingParams
from dovetail_rollouts import Group
from dovetail_rollouts.group_state import pack, unpack
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout

LENGTH = 6


def token(sample: int, place: int) -> int:
    """Return the token of a sample at a position, which depends only on the sample's random stream."""
    return 100 * (sample + 1) + place


class Typist(ScriptedRollout):
    """A replica that produces its samples token by token.

    Attributes:
        limit: the number of tokens, over all parts of a response, at which responses wait for now.
        ends: the samples that the engine itself aborts after their first token.
        active: the number of running requests.
        late: the prompts whose responses take some time to end after an abort.
        done: the number of tokens of each prompt's latest response.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.limit = LENGTH
        self.ends: set[int] = set()
        self.late: set[int] = set()
        self.held: set[int] = set()
        self.active = 0
        self.done: dict[int, int] = {}

    async def submit(self, request: RolloutRequest) -> Any:
        self.requests.append(request)
        await self._begins.wait()
        self._running.add(request.request_id)
        self.active += 1
        try:
            for number, stream in enumerate(request.streams):
                tokens: list[int] = []
                versions: list[int] = []
                aborted = request.request_id in self.aborted
                while len(tokens) < request.sampling.max_new_tokens and not aborted:
                    if stream.offset + len(tokens) < self.limit:
                        tokens.append(token(stream.sample, stream.offset + len(tokens)))
                        versions.append(self.version)
                        self.done[stream.prompt] = stream.offset + len(tokens)
                    await asyncio.sleep(0)
                    await self._goes_on.wait()
                    aborted = request.request_id in self.aborted or stream.sample in self.ends
                if aborted and stream.prompt in self.late:
                    await asyncio.sleep(0.02)
                log_probs = -np.array(tokens, np.float32) if request.sampling.log_probs else None
                yield Completion(
                    request_id=request.request_id,
                    sample=number,
                    response_ids=np.array(tokens, np.int64),
                    finish_reason=FinishReason.ABORT if aborted else FinishReason.LENGTH,
                    weight_versions=np.array(versions, np.int64),
                    log_probs=log_probs,
                )
        finally:
            self._running.discard(request.request_id)
            self.active -= 1


@pytest.fixture
def typing(serve) -> Callable[..., Any]:
    return lambda **options: serve(engine=Typist, **options)


def group_of(served: Any, prompt: int = 0, n: int = 1, **sampling: Any) -> Group:
    group: Group = served.group_of(prompt, n)
    group.sampling = SamplingParams(max_new_tokens=LENGTH, log_probs=True, **sampling)
    return group


def begin(served: Any, *groups: Group, tokens: int = 2) -> None:
    """Queue groups, and wait until their responses have this number of tokens."""
    served.engine.limit = tokens
    served.service.admit(groups)
    prompts = [group.prompt.index for group in groups]
    served.until(lambda: all(served.engine.done.get(prompt) == tokens for prompt in prompts))


def finish(served: Any, count: int = 1) -> list[Group]:
    served.engine.limit = LENGTH
    return served.service.take(count)


def ids(group: Group) -> list[list[int]]:
    return [sample.completion.response_ids.tolist() for sample in group.samples]


def whole(n: int = 1) -> list[list[int]]:
    """The complete responses of n samples."""
    return [[token(sample, place) for place in range(LENGTH)] for sample in range(n)]


def restored(state: dict[str, Any], group: Group) -> Group:
    def issued(epoch: int, prompt: int, attempt: int) -> Any:
        ids = np.arange(3)
        return Prompt(index=prompt, prompt_ids=ids, raw=str(prompt), epoch=epoch, attempt=attempt)

    (found,) = unpack(state, issued, lambda _: group.sampling)
    return found


def test_a_checkpoint_keeps_the_tokens_of_running_responses_and_they_go_on(typing) -> None:
    served = typing(continues=True)
    group = group_of(served, n=2)
    begin(served, group)
    state = served.service.kept(pack)
    kept = restored(state, group)
    found = {name: c.response_ids.tolist() for name, c in kept.cut.items()}
    assert found == {"train.e0.p0.a0.s0": whole()[0][:2]}  # the second has no token yet
    (taken,) = finish(served)
    assert ids(taken) == whole(2)
    first = taken.samples[0].completion
    assert (first.request_id, first.sample, first.finish_reason) == ("train.e0.p0.a0", 0, "length")
    np.testing.assert_array_equal(first.log_probs, -first.response_ids.astype(np.float32))
    assert taken.samples[0].score == LENGTH


def test_the_rest_is_asked_for_after_the_tokens_that_are_there(typing) -> None:
    served = typing(continues=True)
    begin(served, group_of(served))
    served.service.kept(pack)
    finish(served)
    first, rest = served.engine.requests
    assert rest.prompt_ids.tolist() == [*first.prompt_ids.tolist(), *whole()[0][:2]]
    assert rest.sampling == attrs.evolve(first.sampling, max_new_tokens=LENGTH - 2)
    assert rest.streams == (attrs.evolve(first.streams[0], offset=2),)
    assert rest.request_id != first.request_id


def test_another_process_goes_on_with_what_a_checkpoint_kept(typing) -> None:
    served = typing(continues=True)
    group = group_of(served, n=3)
    begin(served, group)
    state = served.service.kept(pack)
    later = typing(continues=True)
    later.service.give_back([restored(state, group)])
    (taken,) = finish(later)
    assert ids(taken) == whole(3)
    assert [sample.score for sample in taken.samples] == [LENGTH] * 3
    assert sorted(len(request.prompt_ids) for request in later.engine.requests) == [3, 5]


def test_responses_that_have_arrived_are_not_asked_for_again(typing) -> None:
    served = typing(continues=True)
    served.manager.seconds = 60.0
    group = group_of(served, n=2)
    served.service.admit([group])
    served.until(lambda: len(group.arrived) == 2)
    state = served.service.kept(pack)
    later = typing(continues=True)
    later.service.give_back([restored(state, group)])
    (taken,) = finish(later)
    assert ids(taken) == whole(2)
    assert [sample.text for sample in taken.samples] == [str(tokens) for tokens in whole(2)]
    assert later.engine.requests == []


def test_a_stop_keeps_the_tokens_of_responses_that_it_ends(typing) -> None:
    served = typing(continues=True)
    group = group_of(served)
    begin(served, group)
    served.stops = True
    with pytest.raises(StopRequested):
        served.service.take(1)
    assert served.quiet()
    assert [c.response_ids.tolist() for c in group.cut.values()] == [whole()[0][:2]]
    assert restored(served.service.kept(pack), group).cut.keys() == group.cut.keys()
    served.stops = False
    assert ids(finish(served)[0]) == whole()


def test_without_continuation_a_checkpoint_keeps_all_admitted_groups_or_none(typing) -> None:
    """Responses that are generated again in another batch would not be equal to the last bit."""
    served = typing()
    begin(served, group_of(served, 0), group_of(served, 1))
    asked = len(served.engine.requests)
    assert served.service.kept(len) == 0
    assert len(served.engine.requests) == asked
    served.engine.limit = LENGTH
    served.until(lambda: not served.service.running)
    assert served.service.kept(len) == 2


def test_new_weights_take_over_in_the_middle_of_a_response(typing) -> None:
    served = typing(partial=True)
    begin(served, group_of(served))
    with served.service.held(nullcontext):
        assert served.engine.active == 0
        served.engine.versions.append(7)
    (taken,) = finish(served)
    assert ids(taken) == whole()
    assert taken.samples[0].completion.weight_versions.tolist() == [0, 0, 7, 7, 7, 7]


def test_after_new_weights_the_oldest_groups_are_asked_for_first(typing) -> None:
    served = typing(partial=True)
    served.engine.late = {0}
    groups = [group_of(served, prompt, n) for prompt, n in enumerate((2, 1, 1))]
    begin(served, *groups)
    asked = len(served.engine.requests)
    with served.service.held(nullcontext):
        served.service.admit([group_of(served, 3)])
    finish(served, 4)
    again = [request.streams[0].prompt for request in served.engine.requests[asked:]]
    assert again == [0, 0, 1, 2, 3]


def test_responses_that_keep_their_cache_stay_in_the_engine_while_weights_are_sent(typing) -> None:
    served = typing(partial=True, service={"keeps_cache": True})
    groups = [group_of(served, prompt, 2) for prompt in (0, 1)]
    begin(served, *groups)
    with served.service.held(nullcontext):
        served.engine.versions.append(7)
        served.engine.limit = LENGTH
        served.service.admit([group_of(served, 2)])
        time.sleep(0.05)
        assert served.engine.done == {0: 2, 1: 2}
    finish(served, 3)
    assert [request.streams[0].prompt for request in served.engine.requests] == [0, 1, 2]
    assert not served.engine.aborted
    for group in groups:
        assert ids(group) == whole(2)
        assert [s.completion.weight_versions.tolist() for s in group.samples] == [
            [0, 0, 7, 7, 7, 7],
            [7] * LENGTH,
        ]


def test_a_checkpoint_cuts_responses_short_that_keep_their_cache_over_an_update(typing) -> None:
    served = typing(partial=True, continues=True, service={"keeps_cache": True})
    group = group_of(served)
    begin(served, group)
    state = served.service.kept(pack)
    assert [len(c.response_ids) for c in restored(state, group).cut.values()] == [2]
    finish(served)
    assert ids(group) == whole()


def test_a_response_is_cut_short_any_number_of_times(typing) -> None:
    served = typing(partial=True)
    begin(served, group_of(served))
    for version in (1, 2, 3):
        served.engine.limit = 2 + version
        served.until(lambda: served.engine.done[0] == served.engine.limit)
        with served.service.held(nullcontext):
            served.engine.versions.append(version)
    (taken,) = finish(served)
    assert ids(taken) == whole()
    assert taken.samples[0].completion.weight_versions.tolist() == [0, 0, 0, 1, 2, 3]


def test_tokens_in_which_a_stop_string_may_have_begun_are_drawn_again(typing) -> None:
    served = typing(partial=True)
    begin(served, group_of(served, stop=("abc",)), tokens=5)
    with served.service.held(nullcontext):
        served.engine.versions.append(1)
    (taken,) = finish(served)
    assert served.engine.requests[1].streams[0].offset == 2
    assert ids(taken) == whole()
    assert taken.samples[0].completion.weight_versions.tolist() == [0, 0, 1, 1, 1, 1]


def test_what_an_engine_ends_of_its_own_accord_is_a_sample(typing) -> None:
    served = typing(partial=True, continues=True)
    served.engine.ends.add(0)
    served.service.admit([group_of(served)])
    (taken,) = served.service.take(1)
    assert ids(taken) == [whole()[0][:1]]
    assert taken.samples[0].completion.finish_reason is FinishReason.ABORT


# -- suspended ----------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_nothing_is_generated_or_scored_until_it_is_resumed(typing, partial: bool) -> None:
    served = typing(partial=partial)
    served.manager.seconds = 0.05
    begin(served, group_of(served))
    if not partial:
        threading.Timer(0.05, setattr, (served.engine, "limit", LENGTH)).start()
    served.service.suspend(nullcontext)
    assert (served.engine.active, served.manager.running) == (0, 0)
    assert served.manager.slept[-1:] == [0]
    asked = len(served.engine.requests)
    served.service.admit([group_of(served, 1)])
    with served.service.held(nullcontext):
        served.engine.versions.append(5)
    assert len(served.engine.requests) == asked
    served.service.resume()
    first, second = finish(served, 2)
    assert (ids(first), ids(second)) == (whole(), whole())
    made = first.samples[0].completion.weight_versions.tolist()
    assert made == ([0, 0, 5, 5, 5, 5] if partial else [0] * LENGTH)


def test_a_checkpoint_of_a_suspended_service_leaves_it_suspended(typing) -> None:
    served = typing(partial=True, continues=True)
    group = group_of(served)
    begin(served, group)
    served.service.suspend(nullcontext)
    assert len(restored(served.service.kept(pack), group).cut) == 1
    served.engine.limit = LENGTH
    assert served.engine.active == 0
    served.service.resume()
    assert ids(finish(served)[0]) == whole()


def test_responses_of_a_drained_replica_go_on_from_their_tokens_on_another(typing) -> None:
    served = typing(partial=True)
    other = type(served.engine)()
    served.pool.replicas.join(other)
    begin(served, group_of(served, n=2))
    served.service.start(served.service.drain(served.pool.replicas.members[0])).result(60)
    other.versions.append(7)
    assert served.pool.replicas.usable == (other,)
    other.limit = LENGTH
    (taken,) = served.service.take(1)
    assert ids(taken) == whole(2)
    begun = [request for request in other.requests if request.streams[0].offset == 2]
    assert [request.streams[0].sample for request in begun] == [0]
    assert taken.samples[0].completion.weight_versions.tolist()[:2] == [0, 0]
