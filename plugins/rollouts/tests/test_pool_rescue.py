"""A pool whose replicas are all lost: they are restarted once, and only missing samples are requested again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.errors import RequestRefusedError, RolloutError, WeightSyncError
from dovetail.interfaces import Completion, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail_sdk.testing.scripted_rollout import answers, stream_answer


def requests_of(sizes: Sequence[int]) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            request_id=f"r{number}",
            prompt_ids=np.arange(1, 4),
            sampling=SamplingParams(max_new_tokens=8),
            streams=tuple(SampleStream(seed=1, prompt=number, sample=i) for i in range(size)),
        )
        for number, size in enumerate(sizes)
    ]


def generated(world: Any, requests: list[RolloutRequest]) -> list[Completion]:
    return asyncio.run(answers(world.pool, requests))


def rescued(world: Any, version: int = 1) -> Any:
    world.weights.version = version
    world.pool.rescue = world.sync.rescue
    return world


@settings(max_examples=30, deadline=None)
@given(
    lives=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    again=st.lists(st.integers(0, 6), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_every_sample_arrives_once_however_often_all_replicas_die(
    lives: list[int], again: list[int], sizes: list[int], mortal: Any, make_world: Any
) -> None:
    replicas = [mortal() for _ in lives]
    for replica, life in zip(replicas, lives, strict=True):
        replica.dies_after = life
    world = rescued(make_world(replicas, max_restarts=10))
    plan = iter(again)
    start = world.restart

    def restart(replica: object) -> Any:
        made = start(replica)
        made.dies_after = next(plan, None)
        return made

    world.pool.replicas._restart = restart
    requests = requests_of(sizes)
    found = generated(world, requests)
    assert sorted((c.request_id, c.sample) for c in found) == [
        (r.request_id, i) for r in requests for i in range(r.n)
    ]
    by_id = {r.request_id: r for r in requests}
    for c in found:
        assert c.response_ids.tolist() == stream_answer(by_id[c.request_id], c.sample)
    assert not any(member.outstanding for member in world.pool.replicas.members)


def test_one_rescue_serves_all_that_is_under_way_and_brings_the_weights(
    mortal: Any, make_world: Any
) -> None:
    replica = mortal()
    replica.dies_after = 3
    world = rescued(make_world([replica]), version=7)
    found = generated(world, requests_of([2] * 6))
    assert len(found) == 12
    assert len(world.made) == 1
    assert world.metrics["rollout/restarts"] == 1.0
    assert world.told[0][1]["cause"] == "replica 0: it died"
    assert {v for c in found[3:] for v in c.weight_versions.tolist()} == {7}
    assert set(world.phases) == {"rollout/rebuild", "rollout/weight_sync"}


def test_a_request_that_living_replicas_refuse_is_no_reason_to_start_them_again(
    mortal: Any, make_world: Any
) -> None:
    class Refusing(mortal):
        async def submit(self, request):
            raise RolloutError("the prompt is too long")
            yield

    dead = mortal()
    dead.dead = True
    world = rescued(make_world([Refusing(), dead]))
    with pytest.raises(RolloutError, match=r"'r0' failed on every.*the prompt.*too long"):
        generated(world, requests_of([1]))
    assert world.made == []


def test_a_request_that_an_engine_does_not_take_ends_with_its_message_and_no_replica_starts_again(
    mortal: Any, make_world: Any
) -> None:
    class Refusing(mortal):
        async def submit(self, request):
            self.requests.append(request)
            raise RequestRefusedError(
                "70 tokens exceed the model's 64 positions", hint="ask for less"
            )
            yield

    replicas = [Refusing(), Refusing()]
    world = rescued(make_world(replicas))
    with pytest.raises(
        RequestRefusedError, match=r"^70 tokens exceed .* positions\n.*ask for less"
    ):
        generated(world, requests_of([1] * 8))
    assert world.made == []
    assert world.pool.replicas.lost() == ()
    assert all(len(request.streams) == 1 for replica in replicas for request in replica.requests)


def test_replicas_that_die_again_and_again_end_the_run_with_the_cause(
    mortal: Any, make_world: Any
) -> None:
    replica = mortal()
    replica.dies_after = 0
    world = rescued(make_world([replica], max_restarts=2))
    start = world.restart

    def restart(old: object) -> Any:
        made = start(old)
        made.dies_after = 0
        return made

    world.pool.replicas._restart = restart
    with pytest.raises(WeightSyncError, match=r"rollout replica was lost.*replica 0"):
        generated(world, requests_of([2, 2]))
    assert len(world.made) == 2


def test_without_a_rescue_requests_fail_as_they_did(mortal: Any, make_world: Any) -> None:
    replica = mortal()
    replica.dies_after = 0
    with pytest.raises(RolloutError, match=r"'r0' failed.*rollout replica.*it died"):
        generated(make_world([replica]), requests_of([1]))


@pytest.mark.timeout(30)
def test_a_request_that_fails_as_a_rescue_ends_starts_the_next_one(
    mortal: Any, make_world: Any
) -> None:
    replica = mortal()
    replica.dies_after = 0
    world = rescued(make_world([replica]))

    async def run() -> list[Completion]:
        # A rescue that ends in this turn of the event loop, before its callbacks have run.
        world.pool._rescuing = asyncio.create_task(asyncio.sleep(0))
        asking = asyncio.create_task(answers(world.pool, requests_of([2])))
        return await asking

    assert len(asyncio.run(run())) == 2
    assert len(world.made) == 1
