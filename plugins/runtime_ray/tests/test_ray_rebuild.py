"""Replicas whose processes are killed and restarted: between steps, in an update, during generation."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import DispatchError, RolloutError, WorkerError
from dovetail.interfaces import Completion, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail.sections import Pool, RolloutSection
from dovetail_rollouts import RolloutPool
from dovetail_runtime_ray.replicas import Replicas
from dovetail_sdk.testing.scripted_rollout import answers, stream_answer


@pytest.fixture(scope="module")
def runtime(probes: Any, start_for_module: Any) -> Any:
    return start_for_module(probes.pool("rollout", ranks=2))


@pytest.fixture(scope="module")
def replicas(probes: Any, runtime: Any) -> list[Any]:
    return list(runtime.rollout_replicas(probes.rollout(), 2))


@pytest.fixture
def pool(runtime: Any, replicas: list[Any]) -> RolloutPool:
    """A pool over the two replicas; a replica that a test restarts replaces the old one in the next tests too."""

    def restart(replica: Any) -> Any:
        again = runtime.restart_replica(replica)
        replicas[replicas.index(replica)] = again
        return again

    return RolloutPool(replicas, restart=restart)


def requests_of(count: int, name: str) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            request_id=f"{number}-{name}",
            prompt_ids=np.arange(4),
            sampling=SamplingParams(max_new_tokens=20),
            streams=tuple(SampleStream(seed=1, prompt=number, sample=i) for i in range(3)),
        )
        for number in range(count)
    ]


def generated(pool: RolloutPool, requests: list[RolloutRequest]) -> list[Completion]:
    return asyncio.run(answers(pool, requests))


def check_once(found: list[Completion], requests: list[RolloutRequest]) -> None:
    assert sorted((c.request_id, c.sample) for c in found) == sorted(
        (r.request_id, i) for r in requests for i in range(r.n)
    )
    by_id = {r.request_id: r for r in requests}
    for c in found:
        assert c.response_ids.tolist() == stream_answer(by_id[c.request_id], c.sample)


def test_what_is_asked_of_an_engine_crosses_the_wire(
    pool: RolloutPool, replicas: list[Any]
) -> None:
    assert pool.replicas.receivers == 4
    assert pool.replicas.receive_weights(3, "good") == ()  # type: ignore[arg-type]
    scored = asyncio.run(pool.score([np.arange(5), np.arange(3)]))
    assert {number: [len(row) for row in rows] for number, rows in scored.items()} == {  # type: ignore[union-attr]
        0: [4, 2],
        1: [4, 2],
    }
    assert scored[1][0].tolist() == [-3.0] * 4  # type: ignore[index]
    before = pool.replicas.metrics()["rollout/requests"].value
    generated(pool, requests_of(3, "counted"))
    assert pool.replicas.metrics()["rollout/requests"].value == before + 3
    assert pool.replicas.sleep(frozenset({"weights"}), keep_weights=False) == -2
    assert all(replica.alive() for replica in replicas)


def test_a_replica_that_was_killed_between_steps_starts_again_in_its_place(
    runtime: Any, pool: RolloutPool, replicas: list[Any]
) -> None:
    pool.replicas.receive_weights(1, "good")  # type: ignore[arg-type]
    old = replicas[1]
    os.kill(old.facts.pid, signal.SIGKILL)
    (fault,) = pool.replicas.lost()
    assert (fault.number, fault.dead) == (1, True)
    assert pool.replicas.restart([1]) == ()
    new = replicas[1]
    assert new.number == 1
    assert new.facts.pid != old.facts.pid
    with pytest.raises(RolloutError, match="did not start it"):
        runtime.restart_replica(old)
    # The new replica has the weights from disk, so it gets no requests before an update.
    assert pool.replicas.usable == (replicas[0],)
    assert pool.replicas.receive_weights(1, "good") == ()  # type: ignore[arg-type]
    assert pool.replicas.versions == {0: 1, 1: 1}
    requests = requests_of(6, "after")
    check_once(generated(pool, requests), requests)
    assert {
        v for c in generated(pool, requests_of(6, "tokens")) for v in c.weight_versions.tolist()
    } == {1}


def test_a_replica_that_dies_in_an_update_is_told_from_one_that_refuses(
    pool: RolloutPool, replicas: list[Any]
) -> None:
    (fault,) = pool.replicas.receive_weights(5, "dies-on-0")  # type: ignore[arg-type]
    assert (fault.number, fault.dead) == (0, True)
    refusals = pool.replicas.receive_weights(6, "bad")  # type: ignore[arg-type]
    assert {fault.number: fault.dead for fault in refusals} == {0: True, 1: False}
    assert pool.replicas.usable == ()
    assert pool.replicas.restart([0]) == ()
    # A complete update makes a living replica usable again.
    assert pool.replicas.receive_weights(6, "good") == ()  # type: ignore[arg-type]
    assert set(pool.replicas.usable) == set(replicas)


def test_where_all_die_in_generation_what_is_missing_is_asked_of_those_that_came_back(
    pool: RolloutPool,
) -> None:
    rescues = []

    def rescue(lost: Any) -> None:
        rescues.append([fault.number for fault in lost])
        assert pool.replicas.restart(rescues[-1]) == ()
        assert pool.replicas.receive_weights(9, "good") == ()  # type: ignore[arg-type]

    pool.rescue = rescue
    requests = [
        *requests_of(4, "dies-on-0-on-1"),
        *(attrs.evolve(r, request_id=f"x{r.request_id}") for r in requests_of(4, "plain")),
    ]
    found = generated(pool, requests)
    check_once(found, requests)
    assert rescues == [[0, 1]]
    assert 9 in {v for c in found for v in c.weight_versions.tolist()}


def test_nothing_is_started_again_once_training_has_failed(probes: Any, start: Any) -> None:
    failing = start(probes.pool("actor", "rollout"))
    (replica,) = failing.rollout_replicas(probes.rollout(), 1)
    failing._run.health.fail(WorkerError("actor rank 0 died"))
    for _ in range(2):  # at every try
        with pytest.raises(WorkerError, match=r"starting rollout replica 0 again.*was abandoned"):
            failing.restart_replica(replica)


def test_replicas_fit_their_pool() -> None:
    @attrs.frozen(kw_only=True)
    class Wide(RolloutSection):
        def ranks_per_replica(self) -> int:
            return 3

    spec: Any = SimpleNamespace(plugin=SimpleNamespace(config=Wide()), role="rollout")
    pool = Pool(name="all", roles=("rollout",), nodes=2, ranks_per_node=4, accelerators=True)
    reserved: Any = SimpleNamespace(pool=pool)
    with pytest.raises(DispatchError, match="expected at least 9, since the run has 3"):
        Replicas(spec, 3, reserved, None, None, None)  # type: ignore[arg-type]
