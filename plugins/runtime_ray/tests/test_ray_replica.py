"""Rollout replicas in processes of their own: streams, several event loops, weights, and replicas that die."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import Completion, PauseMode, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail_rollouts import RolloutPool
from dovetail_sdk.testing.scripted_rollout import answers, stream_answer


def request(name: str, n: int = 3) -> RolloutRequest:
    streams = tuple(SampleStream(seed=1, prompt=hash(name) % 97, sample=i) for i in range(n))
    return RolloutRequest(
        request_id=name,
        prompt_ids=np.arange(4),
        sampling=SamplingParams(max_new_tokens=20),
        streams=streams,
    )


async def collected(pool: Any, requests: list[RolloutRequest]) -> dict[tuple[str, int], Completion]:
    return {(c.request_id, c.sample): c for c in await answers(pool, requests)}


def check(found: dict[tuple[str, int], Completion], requests: list[RolloutRequest]) -> None:
    assert found.keys() == {(r.request_id, i) for r in requests for i in range(r.n)}
    for r in requests:
        for i in range(r.n):
            assert found[r.request_id, i].response_ids.tolist() == stream_answer(r, i)


@pytest.fixture(scope="module")
def runtime(probes: Any, start_for_module: Any) -> Any:
    return start_for_module(probes.pool("rollout", ranks=2))


@pytest.fixture(scope="module")
def replicas(probes: Any, runtime: Any) -> list[Any]:
    """Two replicas; the last test kills one of them."""
    return runtime.rollout_replicas(probes.rollout(), 2)


def test_completions_stream_from_two_processes_under_several_event_loops(
    replicas: list[Any],
) -> None:
    assert len({replica.facts.pid for replica in replicas} | {os.getpid()}) == 3
    pool = RolloutPool(replicas)
    for turn in range(3):
        requests = [request(f"{turn}-{i}") for i in range(20)]
        check(asyncio.run(collected(pool, requests)), requests)


def test_a_sample_is_there_before_the_request_is_finished(replicas: list[Any]) -> None:
    async def first() -> None:
        async for _ in replicas[0].submit(request("first-slow-later", 3)):
            break

    # `slow` holds back every sample, so the wait for the first sample must time out.
    async def told() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first(), 1.0)
        # A reader that stops reading ends the request, and the replica answers further requests.
        await asyncio.sleep(0.2)
        found = [c async for c in replicas[0].submit(request("after"))]
        assert len(found) == 3

    asyncio.run(told())


def test_an_engine_s_own_failure_is_a_rollout_error_with_its_words(replicas: list[Any]) -> None:
    async def failing() -> None:
        async for _ in replicas[0].submit(request("this-breaks")):
            pass

    with pytest.raises(RolloutError, match="rollout replica 0 failed: ValueError: this-breaks"):
        asyncio.run(failing())


def test_weights_memory_and_pauses_reach_the_engine(replicas: list[Any]) -> None:
    pool = RolloutPool(replicas)
    pool.replicas.receive_weights(7, "good")  # type: ignore[arg-type]
    assert pool.replicas.sleep(frozenset({"weights", "kv_cache"})) == 2 * 2048
    pool.replicas.wake(frozenset({"weights"}))

    async def paused() -> list[Completion]:
        await asyncio.gather(*(replica.pause(PauseMode.KEEP) for replica in replicas))
        task = asyncio.create_task(collected(pool, [request("paused")]))
        await asyncio.sleep(0.3)
        assert not task.done()
        await pool.abort(["paused"])
        await asyncio.gather(*(replica.resume() for replica in replicas))
        await asyncio.gather(*(replica.reset_cache() for replica in replicas))
        return list((await task).values())

    finished = asyncio.run(paused())
    assert {c.finish_reason for c in finished} == {"abort"}
    with pytest.raises(WeightSyncError, match="what was sent"):
        replicas[1].receive_weights(8, "bad")  # type: ignore[arg-type]


def test_versions_of_tokens_are_those_of_the_replica(replicas: list[Any]) -> None:
    replicas[0].receive_weights(11, "good")

    async def tokens() -> list[Completion]:
        return [c async for c in replicas[0].submit(request("versions"))]

    assert {v for c in asyncio.run(tokens()) for v in c.weight_versions.tolist()} == {11}


def test_a_dead_replica_s_requests_go_to_the_other(runtime: Any, replicas: list[Any]) -> None:
    pool = RolloutPool(replicas)
    requests = [request(f"{i}-dies-on-0") for i in range(8)]
    check(asyncio.run(collected(pool, requests)), requests)
    with pytest.raises(RolloutError, match=rf"rollout replica 0 \(pid {replicas[0].facts.pid} on"):
        replicas[0].receive_weights(1, "good")
    assert [fault.number for fault in pool.replicas.lost()] == [0]
    assert any(
        "rollout replica 0" in event and "died" in event
        for event, _ in runtime.context.logger.events
    )
