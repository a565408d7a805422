"""RolloutPool: every requested sample arrives exactly once, whatever replicas do."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import FinishReason, RolloutRequest, SamplingParams, WeightManifest
from dovetail.random_streams import SampleStream
from dovetail_rollouts import RolloutPool
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout, answers, stream_answer


def make_request(name: str, n: int = 2, max_new_tokens: int = 8, prompt_length: int = 3):
    number = int("".join(c for c in name if c.isdigit()) or 0)
    return RolloutRequest(
        request_id=name,
        prompt_ids=np.arange(1, prompt_length + 1),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        streams=tuple(SampleStream(seed=1, prompt=number, sample=i) for i in range(n)),
    )


def collect(pool: RolloutPool, requests, conversations=None):
    return asyncio.run(answers(pool, requests, conversations))


def keys(completions):
    return sorted((c.request_id, c.sample) for c in completions)


def wanted(requests):
    return sorted((r.request_id, i) for r in requests for i in range(r.n))


def test_all_samples_of_all_requests_arrive_once() -> None:
    requests = [make_request(f"r{i}", n=3) for i in range(10)]
    replicas = [ScriptedRollout() for _ in range(3)]
    assert keys(collect(RolloutPool(replicas), requests)) == wanted(requests)
    assert sum(len(r.requests) for r in replicas) == 10


@given(
    plans=st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=8), min_size=1, max_size=4
    ),
    groups=st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_no_completion_is_lost_or_doubled_under_failures(plans, groups) -> None:
    """Replicas fail at scripted points; one healthy replica makes success possible."""
    replicas = [ScriptedRollout.following(Script(fails_after=plan)) for plan in plans]
    replicas.append(ScriptedRollout())
    requests = [make_request(f"r{i}", n=n) for i, n in enumerate(groups)]
    pool = RolloutPool(replicas)
    completions = collect(pool, requests)
    assert keys(completions) == wanted(requests)
    assert not any(member.outstanding for member in pool.replicas.members)
    # A sample depends only on its random stream, not on the replica or the retry.
    by_id = {r.request_id: r for r in requests}
    for c in completions:
        assert c.response_ids.tolist() == stream_answer(by_id[c.request_id], c.sample)


def test_only_missing_samples_are_asked_for_again() -> None:
    first, second = ScriptedRollout.following(Script(fails_after=[2])), ScriptedRollout()
    request = make_request("r0", n=5)
    completions = collect(RolloutPool([first, second]), [request])
    assert keys(completions) == wanted([request])
    retry = second.requests[0]
    assert retry.streams == request.streams[2:]
    assert retry.request_id != request.request_id


def test_a_request_that_fails_everywhere_raises_with_every_cause() -> None:
    replicas = [ScriptedRollout.following(Script(fails_after=[0])) for _ in range(2)]
    with pytest.raises(RolloutError, match=r"on every rollout replica.*replica 0.*replica 1"):
        collect(RolloutPool(replicas), [make_request("r0")])


def test_an_empty_pool_says_so() -> None:
    with pytest.raises(RolloutError, match="rollout replica"):
        collect(RolloutPool([]), [make_request("r0")])


def test_a_replica_that_keeps_failing_is_left_out_until_it_joins_again() -> None:
    sick, healthy = ScriptedRollout.following(Script(fails_after=[0] * 100)), ScriptedRollout()
    pool = RolloutPool([sick, healthy], max_failures=2)
    for i in range(6):
        collect(pool, [make_request(f"r{i}")])
    assert len(sick.requests) == 2
    assert pool.replicas.usable == (healthy,)
    pool.replicas.join(sick)
    assert set(pool.replicas.usable) == {sick, healthy}


def test_one_incident_that_takes_many_requests_down_is_one_failure() -> None:
    sick, healthy = ScriptedRollout.following(Script(fails_after=[1] * 100)), ScriptedRollout()
    pool = RolloutPool([sick, healthy], max_failures=2)
    requests = [make_request(f"r{i}") for i in range(8)]
    assert keys(collect(pool, requests)) == wanted(requests)
    assert len(sick.requests) == 4
    assert set(pool.replicas.usable) == {sick, healthy}
    # A failed request that was sent after the first incident is a second incident.
    collect(pool, [make_request("r9")])
    assert len(sick.requests) == 5
    assert pool.replicas.usable == (healthy,)


@pytest.mark.parametrize("answers", [1, 3])
def test_too_few_or_too_many_samples_count_as_a_failure(answers: int) -> None:
    class Miscounting(ScriptedRollout):
        async def submit(self, request):
            async for completion in super().submit(request):
                for _ in range(answers if completion.sample == 0 else answers - 1):
                    yield completion

    request = make_request("r0", n=2)
    completions = collect(RolloutPool([Miscounting(), ScriptedRollout()]), [request])
    assert keys(completions) == wanted([request])


def test_work_goes_where_the_fewest_tokens_are_outstanding() -> None:
    replicas = [ScriptedRollout() for _ in range(2)]
    long, *short = [
        make_request("r0", n=1, max_new_tokens=100),
        *(make_request(f"r{i}", n=1, max_new_tokens=10) for i in range(1, 6)),
    ]
    collect(RolloutPool(replicas), [long, *short])
    assert [r.request_id for r in replicas[0].requests] == ["r0"]
    assert len(replicas[1].requests) == 5


def test_a_conversation_stays_with_its_replica() -> None:
    replicas = [ScriptedRollout() for _ in range(3)]
    pool = RolloutPool(replicas)
    for turn in range(4):
        requests = [make_request(f"t{turn}c{i}") for i in range(6)]
        collect(pool, requests, conversations=[f"chat{i}" for i in range(6)])
    for replica in replicas:
        conversations = {r.request_id.split("c")[1] for r in replica.requests}
        assert len(conversations) == 2
        assert len(replica.requests) == 8


def test_a_conversation_moves_when_its_replica_fails() -> None:
    dying, other = ScriptedRollout.following(Script(fails_after=[None, 0])), ScriptedRollout()
    pool = RolloutPool([dying, other])
    for turn in range(3):
        collect(pool, [make_request(f"t{turn}")], conversations=["chat"])
    assert len(dying.requests) == 2
    assert len(other.requests) == 2


def test_samples_stream_before_slow_ones_finish() -> None:
    slow = ScriptedRollout.following(Script(delay=0.2))
    fast = ScriptedRollout()

    async def run():
        pool = RolloutPool([slow, fast])
        found = await answers(pool, [make_request("slow0", n=1), make_request("r1", n=1)])
        return [completion.request_id for completion in found]

    assert asyncio.run(run()) == ["r1", "slow0"]


def test_leaving_early_closes_the_replicas_generators() -> None:
    closed = []

    class Watching(ScriptedRollout):
        async def submit(self, request):
            try:
                async for completion in super().submit(request):
                    yield completion
            finally:
                closed.append(request.request_id)

    async def run():
        pool = RolloutPool([Watching()])
        stream = pool.submit(make_request("r0", n=3))
        await anext(stream)
        await stream.aclose()
        return sum(member.outstanding for member in pool.replicas.members)

    assert asyncio.run(run()) == 0
    assert closed == ["r0"]


def test_an_unexpected_error_is_not_retried() -> None:
    class Broken(ScriptedRollout):
        async def submit(self, request):
            raise TypeError("a bug")
            yield

    other = ScriptedRollout()
    with pytest.raises(TypeError, match="a bug"):
        collect(RolloutPool([Broken(), other]), [make_request("r0")])
    assert not other.requests


def test_weights_sleep_and_close_reach_every_replica() -> None:
    replicas = [ScriptedRollout() for _ in range(3)]
    pool = RolloutPool(replicas)
    pool.replicas.receive_weights(7, WeightManifest(version=7, tensors=()))
    assert [r.version for r in replicas] == [7, 7, 7]
    assert pool.replicas.sleep(frozenset({"weights"})) == 3 * 1024
    pool.replicas.wake(frozenset({"weights"}))
    assert all(not r.asleep for r in replicas)
    pool.replicas.close()
    pool.replicas.close()
    assert all(r.closed for r in replicas)


def test_a_replica_that_refuses_weights_is_named_and_the_others_still_get_them() -> None:
    class Refusing(ScriptedRollout):
        def receive_weights(self, version, manifest):
            raise WeightSyncError("torn")

    good, bad = ScriptedRollout(), Refusing()
    pool = RolloutPool([good, bad])
    (fault,) = pool.replicas.receive_weights(3, WeightManifest(version=3, tensors=()))
    assert str(fault) == "replica 1: torn"
    assert good.version == 3
    assert pool.replicas.versions == {0: 3, 1: None}
    # The replica's weights are undefined, so it gets no requests until it has received a complete update.
    assert pool.replicas.usable == (good,)
    assert [fault.number for fault in pool.replicas.lost()] == [1]


def test_an_abort_reaches_every_replica() -> None:
    async def run():
        replicas = [ScriptedRollout() for _ in range(2)]
        pool = RolloutPool(replicas)
        for replica in replicas:
            await replica.pause()
        requests = [make_request(f"r{i}") for i in range(2)]
        task = asyncio.create_task(answers(pool, requests))
        await asyncio.sleep(0.01)
        assert not task.done()
        await pool.abort(["r0"])
        for replica in replicas:
            await replica.resume()
        return await task

    completions = asyncio.run(run())
    aborted = {c.request_id for c in completions if c.finish_reason is FinishReason.ABORT}
    assert aborted == {"r0"}
    assert len(completions) == 4
