"""RolloutService: requests that fail, stops, engines that leave, and replicas that are all lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dovetail.errors import RolloutError, StopRequested
from dovetail_sdk.testing.scripted_rollout import Script

# -- failures ------------------------------------------------------------------------------------


def test_a_request_that_fails_everywhere_fails_take_and_the_next_one_begins_anew(serve) -> None:
    served = serve(script=Script(fails_after=(None, 1)), held=[1, 2], max_failures=9)
    groups = served.groups_of(0, 1, 2)
    served.service.admit(groups)
    threading.Timer(0.1, served.engine.held.discard, [1]).start()
    with pytest.raises(RolloutError, match=r"on every rollout replica.*as scripted"):
        served.service.take(2)
    assert served.quiet()  # other running requests were ended too
    assert served.service.outstanding == 3
    assert not groups[2].finished
    served.engine.held.clear()
    assert served.service.take(3) == groups
    assert served.complete(*groups)
    assert sorted(served.asked()).count(1) == 2


def test_a_group_that_failed_while_nobody_waited_is_generated_again_when_it_is_taken(serve) -> None:
    served = serve(script=Script(fails_after=(1,)), max_failures=9)
    served.manager.seconds = 0.05
    groups = served.groups_of(0)
    served.service.admit(groups)
    served.until(lambda: served.engine.active == 0 and bool(served.manager.slept))
    assert served.service.take(1) == groups
    assert served.complete(groups[0])
    assert served.asked() == [0, 0]


def test_a_group_that_fails_at_once_is_never_returned_as_if_it_were_finished(serve) -> None:
    served = serve(script=Script(fails_after=(0,) * 40), max_failures=99)
    for prompt in range(20):
        with pytest.raises(RolloutError, match="as scripted"):
            served.service.generate(served.groups_of(prompt))
    served.service.admit(served.groups_of(20))
    with pytest.raises(RolloutError, match="as scripted"):
        served.service.take(1)


def test_generate_that_fails_leaves_admitted_groups_to_be_taken(serve) -> None:
    served = serve(script=Script(fails_after=(None, 0)), held=[0], max_failures=9)
    admitted = served.groups_of(0)
    served.service.admit(admitted)
    served.until(lambda: served.engine.active == 1)
    with pytest.raises(RolloutError, match="as scripted"):
        served.service.generate(served.groups_of(7))
    served.engine.held.clear()
    assert served.service.take(1) == admitted


def test_a_stop_while_take_waits_ends_it_soon_and_leaves_nothing_running(serve) -> None:
    served = serve(held=[0])
    served.manager.seconds = 600.0
    groups = served.groups_of(0, 1)
    served.service.admit(groups)
    served.until(
        lambda: served.manager.running == 2
    )  # prompt 1 is being scored, prompt 0 generated
    asked = threading.Timer(0.2, setattr, (served, "stops", True))
    asked.start()
    began = time.monotonic()
    with pytest.raises(StopRequested):
        served.service.take(2)
    assert time.monotonic() - began < 0.2 + 1.0 + 5.0  # plus time for a busy machine
    assert served.quiet()
    served.stops, served.manager.seconds = False, 0.0
    served.engine.held.clear()
    assert served.service.take(2) == groups


def test_an_engine_that_leaves_ends_the_loop_and_every_call_fails_with_the_cause(serve) -> None:
    served = serve(held=[0])
    served.engine.leaves = 0
    served.service.admit(served.groups_of(0, 1))
    threading.Timer(0.2, served.engine.held.clear).start()
    calls: list[Callable[[], object]] = [
        lambda: served.service.take(1),
        lambda: served.service.take(1),
        lambda: served.service.generate(served.groups_of(7)),
        lambda: served.service.admit(served.groups_of(8)),
    ]
    for call in calls:
        with pytest.raises(RolloutError, match=r"event loop has ended.*the engine left") as error:
            call()
        assert isinstance(error.value.__cause__, SystemExit)
    served.service.close()
    served.service.close()


# -- replicas that are all lost -------------------------------------------------------------------


def lost_in_the_middle(served: Any) -> list[str]:
    """Let the replica die while groups 0 and 1 run, and return a list that records the threads which restart the replica."""
    threads: list[str] = []

    def rescue(lost: Sequence[Any]) -> None:
        threads.append(threading.current_thread().name)
        assert [fault.number for fault in lost] == [0]
        served.engine.dead = False
        served.pool.replicas.restart([0])

    served.service.bring_back_with(rescue)
    served.service.admit(served.groups_of(0, 1))
    served.until(lambda: served.engine.active == 2)
    served.engine.dead = True
    served.engine.held.clear()
    served.until(lambda: served.engine.active == 0)
    return threads


def test_lost_replicas_are_brought_back_by_the_trainers_thread_while_it_takes(serve) -> None:
    served = serve(held=[0, 1], restart=lambda engine: engine)
    threads = lost_in_the_middle(served)
    time.sleep(0.1)
    assert threads == []  # no call waits yet
    groups = served.service.take(2)
    assert served.complete(*groups)
    assert threads == [threading.current_thread().name]


def test_lost_replicas_are_brought_back_while_the_weights_settle(serve) -> None:
    served = serve(held=[0, 1], restart=lambda engine: engine)
    threads = lost_in_the_middle(served)
    served.until(lambda: bool(served.service._rescues))
    assert threads == []
    served.until(lambda: served.service.settle() or bool(threads))
    assert threads == [threading.current_thread().name]
    served.until(lambda: len(served.asked()) == 4)
    served.service.settle()
    assert served.complete(*served.service.take(2))
    assert len(threads) == 1


def test_replicas_that_were_brought_back_otherwise_are_not_brought_back_again(serve) -> None:
    served = serve(held=[0, 1], restart=lambda engine: engine)
    threads = lost_in_the_middle(served)
    served.until(lambda: bool(served.service._rescues))
    served.engine.dead = False
    served.pool.replicas.restart([0])  # as a publication of weights does
    assert served.complete(*served.service.take(2))
    assert threads == []


def test_a_rescue_that_fails_fails_take_and_later_ones_try_again(serve) -> None:
    served = serve(held=[0, 1], restart=lambda engine: engine)
    lost_in_the_middle(served)

    def fails(lost: Sequence[Any]) -> None:
        raise RolloutError("no room")

    rescue = served.service._bring_back
    served.service.bring_back_with(fails)
    for _ in range(2):
        with pytest.raises(RolloutError, match="no room"):
            served.service.take(2)
        assert served.quiet()
    served.service.bring_back_with(rescue)
    assert served.complete(*served.service.take(2))


def test_closing_does_not_wait_for_replicas_that_nobody_brings_back(serve) -> None:
    served = serve(held=[0, 1], restart=lambda engine: engine)
    threads = lost_in_the_middle(served)
    served.until(lambda: bool(served.service._rescues))
    began = time.monotonic()
    served.service.close()
    assert time.monotonic() - began < 5.0
    assert threads == []
