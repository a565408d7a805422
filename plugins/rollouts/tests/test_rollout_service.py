"""RolloutService: groups are generated while the trainer does other work, and are returned in the order of queueing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.errors import RolloutError
from dovetail_rollouts.early_release import EarlyRelease
from dovetail_sdk.testing.scripted_rollout import Script

# -- order ---------------------------------------------------------------------------------------


def test_groups_come_back_in_the_order_of_admission_whatever_finishes_first(serve) -> None:
    served = serve(held=[0, 2])
    first, second = served.groups_of(0, 1, 2), served.groups_of(3, 4)
    served.service.admit(first)
    served.service.admit(second)
    served.until(lambda: second[1].finished and first[1].finished)
    assert not first[0].finished
    served.engine.held.discard(2)
    served.until(lambda: first[2].finished)
    served.engine.held.clear()
    assert served.service.take(2) == first[:2]
    assert served.service.outstanding == 3
    assert served.service.take(3) == [first[2], *second]
    assert served.complete(*(first + second))
    assert served.service.outstanding == 0


def test_finished_groups_come_before_earlier_ones_that_still_run_as_long_as_these_can_wait(
    serve,
) -> None:
    served = serve(held=[0])
    groups = served.groups_of(0, 1, 2, 3)
    for group, due in zip(groups, [2, 2, 3, 3], strict=True):
        group.due = due
    served.service.admit(groups)
    assert served.service.take(2, EarlyRelease(step=1, batch=2)) == groups[1:3]
    assert served.service.passed == {groups[0]}
    threading.Timer(0.2, served.engine.held.clear).start()
    # The first group is due, so the step waits for it.
    assert served.service.take(1, EarlyRelease(step=2, batch=1)) == groups[:1]
    assert not served.service.passed
    assert served.service.take(1) == groups[3:]


def test_a_group_that_is_left_counts_as_passed_over_until_it_is_taken_also_over_several_takes(
    serve,
) -> None:
    served = serve(held=[0])
    groups = served.groups_of(0, 1, 2, 3)
    for group in groups:
        group.due = 4
    served.service.admit(groups)
    first = EarlyRelease(step=1, batch=2)
    assert served.service.take(2, first) == groups[1:3]
    assert served.service.take(1, first) == groups[3:]  # in place of a group that filters dropped
    assert served.service.passed == {groups[0]}
    served.engine.held.clear()
    assert served.service.take(1, first) == groups[:1]
    assert not served.service.passed


def test_a_group_that_fails_while_others_may_come_first_fails_the_step(serve) -> None:
    served = serve(held=[0])
    groups = served.groups_of(0, 1)
    served.service.admit(groups)
    served.engine.dead = True
    with pytest.raises(RolloutError):
        served.service.take(2, EarlyRelease(step=1, batch=2))


def test_all_requests_of_one_admission_reach_the_engine_in_one_turn_of_the_loop(serve) -> None:
    served = serve()
    served.service.admit([served.group_of(prompt, baseline=True) for prompt in range(20)])
    served.service.take(20)
    assert len(served.engine.turns) == 40
    assert len(set(served.engine.turns)) == 1


def test_more_than_is_admitted_is_refused_and_nothing_is_taken(serve) -> None:
    served = serve()
    groups = served.groups_of(0, 1)
    served.service.admit(groups)
    with pytest.raises(RolloutError, match=r"3 groups.*only 2 are admitted") as error:
        served.service.take(3)
    assert error.value.hint == "pass more groups to `admit` first"
    assert served.service.take(2) == groups


def test_taking_nothing_returns_nothing(serve) -> None:
    served = serve()
    assert served.service.take(0) == []
    served.service.admit([])
    assert served.service.outstanding == 0


def test_groups_that_were_given_back_come_first_as_they_are_and_are_not_generated_again(
    serve,
) -> None:
    served = serve()
    first, second = served.groups_of(0, 1), served.groups_of(2, 3)
    served.service.admit(first + second)
    taken = served.service.take(2)
    samples = [list(group.samples) for group in taken]
    served.service.give_back(taken)
    assert served.service.outstanding == 4
    assert served.service.take(3) == [*first, second[0]]
    assert [group.samples for group in first] == samples
    assert sorted(served.asked()) == [0, 1, 2, 3]


def test_a_group_that_was_given_back_unfinished_gets_what_it_lacks(serve) -> None:
    served = serve()
    [group] = groups = served.groups_of(0)
    served.service.admit(groups)
    served.service.take(1)
    kept = group.samples.pop(0)
    group.try_again(whole=False)
    served.service.give_back(groups)
    assert served.service.take(1) == groups
    assert [request.n for request in served.engine.requests] == [2, 1]
    assert len(group.samples) == 2
    assert kept not in group.samples


def test_generating_beside_admitted_groups_does_not_disturb_them(serve) -> None:
    served = serve(held=[0])
    admitted, beside = served.groups_of(0, 1), served.groups_of(7, 8)
    served.service.admit(admitted)
    served.service.generate(beside)
    assert served.complete(*beside)
    assert not admitted[0].finished
    assert served.service.outstanding == 2
    served.engine.held.clear()
    assert served.service.take(2) == admitted
    assert sorted(served.asked()) == [0, 1, 7, 8]


def test_a_wait_without_a_response_says_who_waits_for_whom_and_goes_on(serve) -> None:
    warnings: list[tuple[str, dict[str, Any]]] = []
    logger = SimpleNamespace(warning=lambda event, **facts: warnings.append((event, facts)))
    served = serve(held=[0], service={"stall_seconds": 0.2, "logger": logger})
    groups = served.groups_of(0, 1, 2)
    served.service.admit(groups)
    served.until(lambda: groups[2].finished)
    threading.Timer(1.5, served.engine.held.clear).start()
    assert served.service.take(2) == groups[:2]
    event, facts = warnings[0]
    assert event == "rollout_stalled"
    assert facts.pop("seconds_without_response") >= 0.2
    assert facts == {
        "trainer_waits_for": "1 group(s)",
        "rollout_waits_for": "replicas 0",
        "requests_by_replica": {0: 1},
        "groups_running": 1,
        "groups_admitted": 3,
        "groups_ready": 2,
    }
    assert served.service.seconds()["rollout/stalls"] == len(warnings) > 0
    assert "rollout/stalls" not in served.service.seconds()
    served.manager.seconds = 1.0
    warnings.clear()
    served.service.generate(served.groups_of(3))
    assert warnings[0][1]["rollout_waits_for"] == "scores, tools or agent loops"


# -- a version boundary -------------------------------------------------------------------------


def test_running_requests_end_before_the_block_and_further_ones_begin_after_it(serve) -> None:
    served = serve(held=[0])
    served.service.admit(served.groups_of(0))
    served.until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with served.service.held(nullcontext):
        assert served.engine.active == 0
        served.service.admit(served.groups_of(1))
        time.sleep(0.05)
        assert served.asked() == [0]
        versions = [served.engine.version]
        served.engine.versions.append(7)
    groups = served.service.take(2)
    made = [{int(v) for s in g.samples for v in s.completion.weight_versions} for g in groups]
    assert made == [set(versions), {7}]


def test_what_a_failing_replica_owes_comes_of_another_one_before_the_block(serve) -> None:
    served = serve(script=Script(fails_after=(1,)), held=[0], max_failures=9)
    other = type(served.engine)()
    served.pool.replicas.join(other)
    served.service.admit(served.groups_of(0))
    served.until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with served.service.held(nullcontext):
        assert (served.engine.active, other.active, len(other.requests)) == (0, 0, 1)
        other.versions.append(7)
    [group] = served.service.take(1)
    assert [int(s.completion.weight_versions[0]) for s in group.samples] == [0, 0]


def test_replicas_lost_while_the_block_waits_for_them_are_brought_back_after_it(serve) -> None:
    served = serve(held=[0, 1], restart=lambda engine: engine)
    threads: list[str] = []

    def rescue(lost: Sequence[Any]) -> None:
        threads.append(threading.current_thread().name)
        served.engine.dead = False
        served.pool.replicas.restart([0])

    served.service.bring_back_with(rescue)
    served.service.admit(served.groups_of(0, 1))
    served.until(lambda: served.engine.active == 2)
    threading.Timer(0.1, setattr, (served.engine, "dead", True)).start()
    with served.service.held(nullcontext):
        assert served.engine.active == 0
        served.until(lambda: bool(served.service._rescues))
        assert threads == []
        served.engine.held.clear()
    served.until(lambda: served.service.settle() or bool(threads))
    assert threads == [threading.current_thread().name]
    assert served.complete(*served.service.take(2))


def test_the_block_ends_with_an_error_and_generation_goes_on(serve) -> None:
    served = serve(held=[0])
    served.service.admit(served.groups_of(0))
    served.until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with pytest.raises(ValueError, match="torn"), served.service.held(nullcontext):
        raise ValueError("torn")
    served.service.admit(served.groups_of(1))
    assert served.complete(*served.service.take(2))


def test_weights_do_not_wait_for_samples_that_are_only_being_scored(serve) -> None:
    served = serve()
    served.manager.seconds = 600.0
    served.service.admit(served.groups_of(0))
    served.until(lambda: served.manager.running == 2)
    began = time.monotonic()
    with served.service.held(nullcontext):
        assert time.monotonic() - began < 10.0
        assert served.manager.running == 2


# -- time ---------------------------------------------------------------------------------------


def test_seconds_say_what_of_scoring_generation_did_not_hide(serve) -> None:
    served = serve(script=Script(delay=0.1))
    served.manager.seconds = 0.2
    served.service.admit([served.group_of(0, n=2)])
    served.service.take(1)
    seconds = served.service.seconds()
    assert set(seconds) == {
        "time/rollout/generation",
        "time/rollout/scoring",
        "time/rollout/scoring_left",
        "rollout/idle_seconds",
        "perf/rollout_concurrency",
    }
    assert 1.0 < seconds["perf/rollout_concurrency"] <= 2.0
    assert 0.05 < seconds["time/rollout/generation"] < 5.0
    assert 0.1 < seconds["time/rollout/scoring"] < 5.0
    assert 0.1 < seconds["time/rollout/scoring_left"] < 5.0
    assert seconds["rollout/idle_seconds"] < 5.0
    time.sleep(0.3)
    since = served.service.seconds()
    assert 0.3 <= since.pop("rollout/idle_seconds") < 5.0
    assert set(since.values()) == {0.0}


def test_scoring_beside_generation_is_hidden(serve) -> None:
    served = serve(held=[1])
    served.manager.seconds = 0.1
    served.service.admit([served.group_of(0, n=1), served.group_of(1, n=1)])
    served.until(lambda: not served.service._admitted[0].finished)
    served.until(lambda: served.service._admitted[0].finished)
    served.manager.seconds = 0.0
    served.engine.held.clear()
    served.service.take(2)
    seconds = served.service.seconds()
    assert seconds["time/rollout/scoring"] > 0.09
    assert seconds["time/rollout/generation"] > 0.09
    assert seconds["time/rollout/scoring_left"] < seconds["time/rollout/scoring"]


def test_seconds_of_groups_that_still_run_are_not_left_out(serve) -> None:
    served = serve(held=[1])
    served.service.admit(served.groups_of(0, 1))
    served.service.take(1)
    time.sleep(0.1)
    assert served.service.seconds()["time/rollout/generation"] > 0.05
    assert served.service.seconds()["time/rollout/generation"] < 60.0


def test_seconds_before_and_after_what_is_not_counted_are_not_lost(serve) -> None:
    served = serve(held=[1])
    served.service.admit(served.groups_of(1))
    began = time.monotonic()
    time.sleep(0.2)
    with served.service.uncounted():
        time.sleep(0.4)
    time.sleep(0.1)
    seconds = served.service.seconds()
    since = time.monotonic() - began
    assert 0.25 < seconds["time/rollout/generation"] < since - 0.35
    assert seconds["rollout/idle_seconds"] < 0.1
    assert seconds["perf/rollout_concurrency"] == pytest.approx(2.0, rel=0.01)


def test_the_manager_sleeps_when_nothing_runs_any_more_and_not_before(serve) -> None:
    served = serve(held=[1])
    served.service.admit(served.groups_of(0, 1))
    served.service.take(1)
    assert served.manager.slept == []
    served.manager.seconds = 0.05
    served.engine.held.clear()
    served.service.take(1)
    assert served.manager.slept == [0]
    served.service.generate(served.groups_of(2, 3))
    assert served.manager.slept == [0, 0]


# -- the end ------------------------------------------------------------------------------------


def test_closing_ends_everything_that_runs_and_may_be_repeated(serve) -> None:
    served = serve(held=[0])
    served.manager.seconds = 600.0
    served.service.admit(served.groups_of(0, 1))
    served.until(lambda: served.manager.running == 2)
    served.service.close()
    assert served.quiet()
    assert served.manager.slept == [0]
    assert not [t for t in threading.enumerate() if t.name == "dovetail-rollout" and t.is_alive()]
    served.service.close()
    with pytest.raises(RolloutError, match="event loop"):
        served.service.take(1)
