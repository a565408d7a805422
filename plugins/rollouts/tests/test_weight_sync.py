"""WeightSync: every replica gets the complete version, or the run ends with the reason."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from dovetail.errors import (
    CalledOffError,
    NumericsError,
    ReceiverError,
    RolloutError,
    WeightSyncError,
)


def versions(world: Any) -> list[int | None]:
    return [world.pool.replicas.versions[number] for number in sorted(world.pool.replicas.versions)]


def test_all_replicas_take_the_version_and_the_sender_knows_how_many_there_are(
    mortal: Any, make_world: Any
) -> None:
    replicas = [mortal(), mortal(), mortal()]
    world = make_world(replicas)
    world.sync.bring(4)
    assert versions(world) == [4, 4, 4]
    assert {replica.manifests[0].receivers for replica in replicas} == {3}
    assert {len(replica.manifests[0].receivers_on) for replica in replicas} == {0}
    assert world.phases == ["weight_sync"]
    assert "rollout/restarts" not in world.metrics


def test_a_sender_on_each_machine_knows_how_many_there_are_on_its_own(
    mortal: Any, make_world: Any
) -> None:
    replicas = [mortal(), mortal(), mortal()]
    for replica, machine in zip(replicas, ("one", "two", "one"), strict=True):
        replica.context = attrs.evolve(replica.context, machine=machine)
    make_world(replicas).sync.bring(1)
    assert [r.manifests[0].receivers_on for r in replicas] == [{"one": 2, "two": 1}] * 3


def test_without_ends_that_meet_sending_comes_first(mortal: Any, make_world: Any) -> None:
    log: list[str] = []
    make_world([mortal(log)], log=log).sync.bring(1)
    assert log == ["send 1", "take 1"]


def test_ends_that_meet_run_at_once(mortal: Any, make_world: Any) -> None:
    class Meeting(mortal):
        def receive_weights(self, version: int, manifest: Any) -> None:
            meeting.wait(120)
            super().receive_weights(version, manifest)

    meeting = threading.Barrier(3)
    world = make_world([Meeting(), Meeting()], ends_meet=True)
    world.actor.meets = meeting
    world.sync.bring(2)
    assert versions(world) == [2, 2]


@pytest.mark.parametrize("ends_meet", [False, True])
def test_a_replica_that_fails_is_started_again_and_all_get_the_same_version_anew(
    ends_meet: bool, mortal: Any, make_world: Any
) -> None:
    good = mortal()
    world = make_world([good, mortal(refuses=1)], ends_meet=ends_meet)
    if ends_meet:
        world.actor.raises = [WeightSyncError("reached 1 of 2 receivers")]
    world.sync.bring(5)
    assert good.versions == [5, 5]
    assert versions(world) == [5, 5]
    assert set(world.pool.replicas.usable) == {good, world.made[0]}
    first, second = (manifest.update_id for manifest in good.manifests)
    assert first != second
    assert world.metrics["rollout/restarts"] == 1.0
    ((event, fields),) = world.told
    assert event == "rollout_replicas_started_again"
    assert fields["cause"] == "replica 1: torn"


def test_an_update_that_no_replica_can_load_is_refused_before_anything_is_sent(
    mortal: Any, make_world: Any
) -> None:
    class Picky(mortal):
        def check_manifest(self, version: int, manifest: Any) -> None:
            raise WeightSyncError("it takes no adapters")

    log: list[str] = []
    world = make_world([mortal(log), Picky(log)], log=log, ends_meet=True)
    with pytest.raises(WeightSyncError, match=r"^it takes no adapters$"):
        world.sync.bring(1)
    assert log == []
    assert not world.made


def test_a_replica_that_has_died_is_started_before_anything_is_sent(
    mortal: Any, make_world: Any
) -> None:
    log: list[str] = []
    gone = mortal(log)
    gone.dead = True
    world = make_world([gone, mortal(log)], log=log)
    world.sync.bring(1)
    assert log[:2] == ["restart", "send 1"]
    assert versions(world) == [1, 1]


def test_after_so_many_rebuilds_the_run_ends_with_every_reason(
    mortal: Any, make_world: Any
) -> None:
    class Never(mortal):
        def receive_weights(self, version: int, manifest: Any) -> None:
            raise WeightSyncError("a digest differs")

    world = make_world([mortal(), Never()], max_restarts=2)

    def restart(replica: Any) -> Any:
        world.made.append(Never())
        return world.made[-1]

    world.pool.replicas._restart = restart
    with pytest.raises(
        WeightSyncError, match=r"1 of 2 replicas .* version 3 after 2 restart"
    ) as caught:
        world.sync.bring(3)
    assert "replica 1: a digest differs" in str(caught.value)
    assert len(world.made) == 2
    # A replica that may hold a mixture of versions gets no requests.
    assert len(world.pool.replicas.usable) == 1


def test_no_rebuilds_let_the_replica_s_own_error_through(mortal: Any, make_world: Any) -> None:
    with pytest.raises(WeightSyncError, match=r"^torn$"):
        make_world([mortal(refuses=1)], max_restarts=0).sync.bring(1)


def test_a_replica_that_can_not_be_started_counts_as_a_try(mortal: Any, make_world: Any) -> None:
    def broken(replica: Any) -> Any:
        raise RolloutError("no memory")

    world = make_world([mortal(refuses=1)])
    world.pool.replicas._restart = broken
    with pytest.raises(WeightSyncError, match=r"after 2 restart\(s\): replica 0: no memory"):
        world.sync.bring(1)


@pytest.mark.parametrize("ends_meet", [False, True])
@pytest.mark.parametrize(
    "fault", [NumericsError("a weight is nan"), WeightSyncError("the tensors are others")]
)
def test_the_sender_s_own_failure_is_raised_as_it_is(
    fault: Exception, ends_meet: bool, mortal: Any, make_world: Any
) -> None:
    # If both ends run at the same time, the receivers fail only because of the sender.
    world = make_world([mortal(refuses=1), mortal(refuses=1)], ends_meet=ends_meet)
    world.actor.raises = [fault]
    with pytest.raises(type(fault)) as caught:
        world.sync.bring(1)
    assert caught.value is fault
    assert world.made == []


@pytest.mark.parametrize("dead", [False, True])
def test_a_sender_that_lost_its_only_receiver_is_not_at_fault(
    dead: bool, mortal: Any, make_world: Any
) -> None:
    class Dying(mortal):
        def receive_weights(self, version: int, manifest: Any) -> None:
            self.dead = dead
            raise RolloutError("it died" if dead else "it refused")

    world = make_world([Dying()], ends_meet=True)
    error = WeightSyncError if dead else ReceiverError
    world.actor.raises = [error("reached none of 1 receivers")]
    world.sync.bring(1)
    assert versions(world) == [1]
    assert len(world.made) == 1


def test_a_rollout_that_went_well_makes_failures_new_ones(mortal: Any, make_world: Any) -> None:
    world = make_world([mortal()], max_restarts=1)
    for version in (1, 2, 3):
        world.pool.replicas.usable[0].refuses = 1  # type: ignore[attr-defined]
        world.sync.bring(version)
        world.sync.generated()
    assert world.metrics["rollout/restarts"] == 3.0
    world.pool.replicas.usable[0].refuses = 1  # type: ignore[attr-defined]
    world.sync.bring(4)
    world.pool.replicas.usable[0].refuses = 1  # type: ignore[attr-defined]
    with pytest.raises(WeightSyncError, match="not receive weights of version 5"):
        world.sync.bring(5)


def test_a_replica_that_joins_gets_requests_with_the_next_update(
    mortal: Any, make_world: Any
) -> None:
    world = make_world([mortal()])
    world.sync.bring(1)
    late = mortal()
    world.pool.replicas.join(late)
    assert late not in world.pool.replicas.usable
    world.sync.bring(2)
    assert late in world.pool.replicas.usable
    assert world.made == []


def test_offloaded_replicas_sleep_through_training_and_wake_around_the_update(
    mortal: Any, make_world: Any
) -> None:
    log: list[str] = []
    world = make_world([mortal(log)], log=log, offload=True)
    world.sync.bring(1)
    # At the start of a run the actor is on the accelerator too, so the engine makes room for it.
    around = [
        "free caches",
        "wake weights",
        "send 1",
        "take 1",
        "settle",
        "free caches",
        "wake kv_cache",
    ]
    assert log == ["sleep", *around]
    world.sync.ready()
    log.clear()
    world.sync.rest()
    assert log == ["sleep"]
    assert world.metrics["rollout/freed_bytes"] == 2048.0
    world.sync.bring(2)
    sent = [
        "free caches",
        "wake weights",
        "send 2",
        "take 2",
        "settle",
        "free caches",
        "wake kv_cache",
    ]
    assert log[1:] == sent
    log.clear()
    world.sync.ready()
    assert log == ["settle"]
    # Without an update in between, the replica wakes with its old weights.
    world.sync.rest()
    world.sync.ready()
    assert log == ["settle", "sleep", "settle", "free caches", "wake kv_cache+weights"]
    assert set(world.phases) == {"sleep", "wake", "weight_sync"}


def test_an_engine_that_may_forget_its_weights_wants_an_update_before_it_generates(
    mortal: Any, make_world: Any
) -> None:
    log: list[str] = []
    world = make_world(
        [mortal(log)], log=log, offload=True, capabilities=frozenset({"discards_weights"})
    )
    world.sync.bring(1)
    world.sync.rest()
    assert log[-1] == "sleep and forget"
    log.clear()
    world.sync.ready()
    assert "take 1" in log
    log.clear()
    world.sync.ready()
    assert log == ["settle"]


def test_a_replica_that_can_not_wake_is_started_again(mortal: Any, make_world: Any) -> None:
    class Sleeper(mortal):
        def wake(self, tags: frozenset[str]) -> None:
            raise RolloutError("out of memory")

    world = make_world([Sleeper()], offload=True)
    world.sync.bring(1)
    assert versions(world) == [1]
    assert not world.made[0].asleep
    assert world.metrics["rollout/restarts"] == 1.0


def test_the_sender_hears_of_a_replica_that_fails_while_the_others_wait_for_it(
    mortal: Any, make_world: Any
) -> None:
    told = threading.Event()

    class Waiting(mortal):
        """A replica that waits for the sender, which aborts the update after a notification."""

        def receive_weights(self, version: int, manifest: Any) -> None:
            if version not in broken:
                broken.append(version)
                assert told.wait(120)
                raise WeightSyncError("the sender says: called off")
            super().receive_weights(version, manifest)

    broken: list[int] = []
    reasons: list[str] = []
    waiting = Waiting()
    world = make_world([waiting, mortal(refuses=1)], ends_meet=True)

    def call_off(manifest: Any, reason: str) -> None:
        reasons.append(reason)
        told.set()

    world.sync._transport = lambda: SimpleNamespace(call_off=call_off)
    world.actor.waits, world.actor.raises = told, [CalledOffError("called off before it began")]
    world.sync.bring(6)
    assert reasons == ["torn"]
    assert versions(world) == [6, 6]
    # The waiting replica received nothing, and needs no restart before the next update.
    assert set(world.pool.replicas.usable) == {waiting, world.made[0]}
    assert world.metrics["rollout/restarts"] == 1.0


@pytest.mark.parametrize("error", [WeightSyncError("nobody listens"), OSError("nobody listens")])
def test_a_sender_that_can_not_be_told_ends_in_its_own_time(
    mortal: Any, make_world: Any, error: Exception
) -> None:
    def call_off(manifest: Any, reason: str) -> None:
        raise error

    world = make_world([mortal(refuses=1)], ends_meet=True)
    world.sync._transport = lambda: SimpleNamespace(call_off=call_off)
    world.actor.raises = [ReceiverError("nobody came")]
    world.sync.bring(1)
    assert versions(world) == [1]
    (told,) = [about for event, about in world.told if event == "weight_sender_not_told"]
    assert "nobody listens" in told["error"]
