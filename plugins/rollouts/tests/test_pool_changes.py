"""Replicas that join, leave and die between updates: each has complete weights before its first request, and none ends the run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from dovetail.errors import CalledOffError, RolloutError, WeightSyncError
from dovetail.sections.rollout import WeightCheckSection

EVERY_UPDATE = {
    "capabilities": frozenset({"scores"}),
    "weight_check": WeightCheckSection(every=1, sequences=2, tokens=5),
}


def outcome(member: Any) -> Any:
    """The weight version with which an added replica began, or the reason for its rejection."""
    joined: Future[int] = member.joined
    return joined.exception(0) or joined.result(0)


def told(world: Any, event: str) -> list[dict[str, Any]]:
    return [fields for name, fields in world.told if name == event]


def add(world: Any, replica: Any) -> Any:
    return world.pool.replicas.add(
        lambda number: replica, f"http://127.0.0.1:{len(world.pool.replicas.all)}"
    )


def test_an_added_replica_gets_requests_when_the_next_weights_have_reached_it_and_were_checked(
    mortal: Any, make_world: Any
) -> None:
    first, late = mortal(), mortal()
    world = make_world([first], capabilities=frozenset({"scores"}))
    world.sync.bring(1)
    member = add(world, late)
    assert (world.pool.replicas.usable, world.pool.replicas.changing) == ((first,), True)
    assert member.state == "starting"
    late.log = world.log
    world.sync.bring(2)
    assert outcome(member) == 2
    assert (world.pool.replicas.usable, world.pool.replicas.changing) == ((first, late), False)
    assert late.manifests[0].receivers == 2
    assert "score" in late.log  # although the weight check is not due for version 2
    (fields,) = told(world, "rollout_replica_joined")
    assert (fields["replica"], fields["version"]) == (1, 2)


class Unfit:
    """Replicas that can't join, by their fault."""

    @staticmethod
    def torn(mortal: Any) -> Any:
        return mortal(refuses=1)

    @staticmethod
    def dead(mortal: Any) -> Any:
        replica = mortal()
        replica.dead = True
        return replica

    @staticmethod
    def off(mortal: Any) -> Any:
        return mortal(off=1.0)

    @staticmethod
    def picky(mortal: Any) -> Any:
        class Picky(mortal):
            def check_manifest(self, version: int, manifest: Any) -> None:
                raise WeightSyncError("it has other tensors")

        return Picky()


@pytest.mark.parametrize("ends_meet", [False, True])
@pytest.mark.parametrize("unfit", [Unfit.torn, Unfit.dead, Unfit.off, Unfit.picky])
def test_an_added_replica_that_does_not_take_the_weights_is_turned_away_and_the_run_goes_on(
    unfit: Any, ends_meet: bool, mortal: Any, make_world: Any
) -> None:
    good = mortal()
    world = make_world([good], ends_meet=ends_meet, max_restarts=0, **EVERY_UPDATE)
    world.sync.bring(1)
    late = unfit(mortal)
    member = add(world, late)
    world.sync.bring(2)
    assert isinstance(outcome(member), RolloutError | WeightSyncError)
    assert (world.pool.replicas.usable, world.pool.replicas.size) == ((good,), 1)
    assert good.version == 2
    assert late.closed
    assert len(told(world, "rollout_replica_left")) == 1
    assert not world.made


def test_with_ends_that_meet_all_are_sent_the_version_again_without_the_one_that_was_turned_away(
    mortal: Any, make_world: Any
) -> None:
    class CalledOff(mortal):
        def receive_weights(self, version: int, manifest: Any) -> None:
            if manifest.receivers == 2:
                raise CalledOffError("a receiver elsewhere will not come")
            super().receive_weights(version, manifest)

    good = CalledOff()
    world = make_world([good], ends_meet=True, max_restarts=0)
    world.sync.bring(1)
    member = add(world, mortal(refuses=1))
    world.actor.raises = [CalledOffError("reached none of 2 receivers")]
    world.sync.bring(2)
    assert isinstance(outcome(member), WeightSyncError)
    assert [manifest.receivers for manifest in good.manifests] == [1, 1]
    assert good.version == 2


@pytest.mark.parametrize("dies", [False, True])
def test_a_drained_replica_leaves_at_the_next_update_and_its_death_is_no_failure(
    dies: bool, mortal: Any, make_world: Any
) -> None:
    staying, leaving = mortal(), mortal()
    world = make_world([staying, leaving], max_restarts=0)
    world.sync.bring(1)
    world.pool.replicas.members[1].draining = True
    leaving.dead = dies
    assert world.pool.replicas.usable == (staying,)
    assert world.pool.replicas.size == 2
    world.sync.bring(2)
    assert world.pool.replicas.size == 1
    assert leaving.closed
    assert leaving.versions == [1]
    assert staying.manifests[-1].receivers == 1
    assert not world.made


def test_a_replica_that_is_drained_and_killed_while_weights_are_sent_is_no_failure(
    mortal: Any, make_world: Any
) -> None:
    class Taken(mortal):
        def receive_weights(self, version: int, manifest: Any) -> None:
            if version == 2:
                world.pool.replicas.members[1].draining = self.dead = True
            super().receive_weights(version, manifest)

    staying = mortal()
    world = make_world([staying, Taken()], max_restarts=0)
    world.sync.bring(1)
    world.sync.bring(2)
    assert (world.pool.replicas.usable, staying.version) == ((staying,), 2)
    assert not world.made


@pytest.mark.parametrize(
    ("max_restarts", "cause"), [(2, "no server answers"), (0, "the replica has died")]
)
def test_a_joined_server_that_is_gone_leaves_while_others_stay_and_ends_the_run_as_the_last(
    max_restarts: int, cause: str, mortal: Any, make_world: Any
) -> None:
    replicas = [mortal(), mortal()]
    world = make_world(replicas, max_restarts=max_restarts)

    def refused(replica: Any) -> Any:
        raise RolloutError("no server answers")

    world.pool.replicas._restart = refused
    for number, member in enumerate(world.pool.replicas.members):
        member.address = f"http://127.0.0.1:{number}"
    world.sync.bring(1)
    replicas[0].dead = True
    world.sync.bring(2)
    assert world.pool.replicas.usable == (replicas[1],)
    (fields,) = told(world, "rollout_replica_left")
    assert (fields["replica"], fields["cause"]) == (0, cause)
    world.sync.generated()
    replicas[1].dead = True
    with pytest.raises(WeightSyncError, match=cause):
        world.sync.bring(3)


def test_an_added_server_that_was_away_for_a_moment_is_joined_again(
    mortal: Any, make_world: Any
) -> None:
    made: list[Any] = []
    world = make_world([mortal()])
    world.sync.bring(1)
    world.pool.replicas.add(lambda number: made.append(mortal()) or made[-1], "http://127.0.0.1:1")
    world.sync.bring(2)
    made[0].dead = True
    world.sync.bring(3)
    assert made[1] in world.pool.replicas.usable
    assert made[1].version == 3
    assert made[0].closed


def test_without_any_replica_the_next_update_says_that_the_last_has_left(
    mortal: Any, make_world: Any
) -> None:
    world = make_world([mortal()])
    world.sync.bring(1)
    world.pool.replicas.members[0].draining = True
    with pytest.raises(WeightSyncError, match=r"^weights of version 1 .* the.*the pool"):
        world.sync.rescue(())


def test_a_request_that_finds_all_replicas_drained_waits_for_one_that_was_added(
    mortal: Any, make_world: Any
) -> None:
    drained, late = mortal(), mortal()
    world = make_world([drained])
    world.sync.bring(1)
    world.pool.replicas.members[0].draining = True
    add(world, late)
    world.sync.rescue(())
    assert world.pool.replicas.usable == (late,)
    assert late.version == 1
