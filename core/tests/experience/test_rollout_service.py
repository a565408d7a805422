"""RolloutService: groups are generated while the trainer does other things, and come back in the order of their admission."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.data.loader import Issued
from dovetail.errors import RolloutError, StopRequested
from dovetail.experience.generation import Group
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.experience.rollout_service import RolloutService
from dovetail.interfaces import (
    PauseMode,
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    SamplingParams,
    Score,
)
from dovetail.scoring.scorer import Scorer
from dovetail.sections import PluginSection
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

LONG = 60.0
"""Seconds in which everything ends that does not hang."""


class Manager(RewardManager):
    """Scores the length of a response, some time after it came.

    Attributes:
        slept: how many units were being scored each time that it was put to sleep.
    """

    name = "lengths"
    api = ">=1.0,<2"

    def __init__(self) -> None:
        super().__init__(PluginSection(name="lengths"), PluginContext())
        self.seconds = 0.0
        self.running = 0
        self.slept: list[int] = []

    async def score(self, unit: Any) -> list[Any]:
        self.running += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return [Score(value=float(len(sample.response_ids))) for sample in unit.samples]

    def sleep(self) -> None:
        self.slept.append(self.running)


class Engine(ScriptedRollout):
    """A scripted replica whose requests wait where a test says so, and which can leave or die.

    Attributes:
        held: prompts whose requests wait; take one out to let them go on.
        turns: the event loop's turn in which each request came.
        active: requests that are under way.
        leaves: the prompt whose request raises SystemExit.
        dead: whether every request fails, and the replica says so.
        paused: how often it was paused.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: set[int] = set()
        self.turns: list[int] = []
        self.turn = 0
        self.active = 0
        self.leaves: int | None = None
        self.dead = False
        self.paused = 0

    def alive(self) -> bool:
        return not self.dead

    async def submit(self, request: RolloutRequest) -> Any:
        self.turns.append(self.turn)
        asyncio.get_running_loop().call_soon(self._next_turn)
        prompt = request.streams[0].prompt
        self.active += 1
        try:
            async for completion in super().submit(request):
                while prompt in self.held and not self.dead:
                    await asyncio.sleep(0.002)
                if self.leaves == prompt:
                    raise SystemExit("the engine left")
                if self.dead:
                    raise RolloutError("it died")
                yield completion
        finally:
            self.active -= 1

    def _next_turn(self) -> None:
        self.turn += 1

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        self.paused += 1
        await super().pause(mode)


def group_of(prompt: int, n: int = 2, **options: Any) -> Group:
    issued = Issued(
        epoch=0, attempt=0, prompt=Prompt(index=prompt, prompt_ids=np.arange(3), raw=str(prompt))
    )
    return Group(issued=issued, n=n, sampling=SamplingParams(max_new_tokens=6), **options)


def groups_of(*prompts: int) -> list[Group]:
    return [group_of(prompt) for prompt in prompts]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


class Served:
    """A service over one replica.

    Attributes:
        stops: whether a stop is asked for.
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine, self.manager, self.stops = engine, Manager(), False
        self.pool = RolloutPool([engine], **options)
        self.scorer = Scorer(self.manager, timeout=LONG)
        self.service = RolloutService(
            pool=self.pool,
            scorer=self.scorer,
            manager=self.manager,
            tokenizer=SimpleNamespace(decode=lambda ids, **_: str(ids)),
            seed=1,
            check_stop=self.check_stop,
        )

    def check_stop(self) -> None:
        if self.stops:
            raise StopRequested("stopped")

    def asked(self) -> list[int]:
        """The prompts of all requests so far."""
        return [request.streams[0].prompt for request in self.engine.requests]

    def quiet(self) -> bool:
        """Whether neither a request nor a reward runs."""
        return not (self.engine.active or self.manager.running)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that makes a `Served`, of a script and the pool's options."""
    with ExitStack() as made:

        def one(
            *, script: Script | None = None, held: Sequence[int] = (), **options: Any
        ) -> Served:
            engine = Engine.following(script or Script())
            assert isinstance(engine, Engine)
            engine.held.update(held)
            served = Served(engine, **options)
            made.callback(served.service.close)
            made.callback(engine.held.clear)
            return served

        yield one


def complete(group: Group) -> bool:
    return group.finished and len(group.samples) == group.n


# -- order ---------------------------------------------------------------------------------------


def test_groups_come_back_in_the_order_of_admission_whatever_finishes_first(serve) -> None:
    served = serve(held=[0, 2])
    first, second = groups_of(0, 1, 2), groups_of(3, 4)
    served.service.admit(first)
    served.service.admit(second)
    until(lambda: second[1].finished and first[1].finished)
    assert not first[0].finished
    served.engine.held.discard(2)
    until(lambda: first[2].finished)
    served.engine.held.clear()
    assert served.service.take(2) == first[:2]
    assert served.service.outstanding == 3
    assert served.service.take(3) == [first[2], *second]
    assert all(map(complete, first + second))
    assert served.service.outstanding == 0


def test_all_requests_of_one_admission_reach_the_engine_in_one_turn_of_the_loop(serve) -> None:
    served = serve()
    served.service.admit([group_of(prompt, baseline=True) for prompt in range(20)])
    served.service.take(20)
    assert len(served.engine.turns) == 40
    assert len(set(served.engine.turns)) == 1


def test_more_than_is_admitted_is_refused_and_nothing_is_taken(serve) -> None:
    served = serve()
    groups = groups_of(0, 1)
    served.service.admit(groups)
    with pytest.raises(RolloutError, match="3 groups are to be taken, and 2 are admitted") as error:
        served.service.take(3)
    assert error.value.hint == "admit as many before"
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
    first, second = groups_of(0, 1), groups_of(2, 3)
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
    [group] = groups = groups_of(0)
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
    admitted, beside = groups_of(0, 1), groups_of(7, 8)
    served.service.admit(admitted)
    served.service.generate(beside)
    assert all(map(complete, beside))
    assert not admitted[0].finished
    assert served.service.outstanding == 2
    served.engine.held.clear()
    assert served.service.take(2) == admitted
    assert sorted(served.asked()) == [0, 1, 7, 8]


# -- failures ------------------------------------------------------------------------------------


def test_a_request_that_fails_everywhere_fails_take_and_the_next_one_begins_anew(serve) -> None:
    served = serve(script=Script(fails_after=(None, 1)), held=[1, 2], max_failures=9)
    groups = groups_of(0, 1, 2)
    served.service.admit(groups)
    threading.Timer(0.1, served.engine.held.discard, [1]).start()
    with pytest.raises(RolloutError, match=r"failed on every rollout replica.*scripted failure"):
        served.service.take(2)
    assert served.quiet()  # what else ran is ended, too
    assert served.service.outstanding == 3
    assert not groups[2].finished
    served.engine.held.clear()
    assert served.service.take(3) == groups
    assert all(map(complete, groups))
    assert sorted(served.asked()).count(1) == 2


def test_a_group_that_failed_while_nobody_waited_is_generated_again_when_it_is_taken(serve) -> None:
    served = serve(script=Script(fails_after=(1,)), max_failures=9)
    served.manager.seconds = 0.05
    groups = groups_of(0)
    served.service.admit(groups)
    until(lambda: served.engine.active == 0 and bool(served.manager.slept))
    assert served.service.take(1) == groups
    assert complete(groups[0])
    assert served.asked() == [0, 0]


def test_a_group_that_fails_at_once_is_never_returned_as_if_it_were_finished(serve) -> None:
    served = serve(script=Script(fails_after=(0,) * 40), max_failures=99)
    for prompt in range(20):
        with pytest.raises(RolloutError, match="scripted failure"):
            served.service.generate(groups_of(prompt))
    served.service.admit(groups_of(20))
    with pytest.raises(RolloutError, match="scripted failure"):
        served.service.take(1)


def test_generate_that_fails_leaves_admitted_groups_to_be_taken(serve) -> None:
    served = serve(script=Script(fails_after=(None, 0)), held=[0], max_failures=9)
    admitted = groups_of(0)
    served.service.admit(admitted)
    until(lambda: served.engine.active == 1)
    with pytest.raises(RolloutError, match="scripted failure"):
        served.service.generate(groups_of(7))
    served.engine.held.clear()
    assert served.service.take(1) == admitted


def test_a_stop_while_take_waits_ends_it_soon_and_leaves_nothing_running(serve) -> None:
    served = serve(held=[0])
    served.manager.seconds = 600.0
    groups = groups_of(0, 1)
    served.service.admit(groups)
    until(lambda: served.manager.running == 2)  # prompt 1 is being scored, prompt 0 generated
    asked = threading.Timer(0.2, setattr, (served, "stops", True))
    asked.start()
    began = time.monotonic()
    with pytest.raises(StopRequested):
        served.service.take(2)
    assert time.monotonic() - began < 0.2 + 1.0 + 5.0  # a busy machine takes its time
    assert served.quiet()
    served.stops, served.manager.seconds = False, 0.0
    served.engine.held.clear()
    assert served.service.take(2) == groups


def test_an_engine_that_leaves_ends_the_loop_and_every_call_fails_with_the_cause(serve) -> None:
    served = serve(held=[0])
    served.engine.leaves = 0
    served.service.admit(groups_of(0, 1))
    threading.Timer(0.2, served.engine.held.clear).start()
    calls: list[Callable[[], object]] = [
        lambda: served.service.take(1),
        lambda: served.service.take(1),
        lambda: served.service.generate(groups_of(7)),
        lambda: served.service.admit(groups_of(8)),
    ]
    for call in calls:
        with pytest.raises(RolloutError, match=r"event loop has ended.*the engine left") as error:
            call()
        assert isinstance(error.value.__cause__, SystemExit)
    served.service.close()
    served.service.close()


# -- replicas that are all lost -------------------------------------------------------------------


def lost_in_the_middle(served: Served) -> list[str]:
    """Groups 0 and 1 run when the replica dies; the threads that bring it back are noted from then on."""
    threads: list[str] = []

    def rescue(lost: Sequence[Any]) -> None:
        threads.append(threading.current_thread().name)
        assert [fault.number for fault in lost] == [0]
        served.engine.dead = False
        served.pool.restart([0])

    served.service.bring_back_with(rescue)
    served.service.admit(groups_of(0, 1))
    until(lambda: served.engine.active == 2)
    served.engine.dead = True
    served.engine.held.clear()
    until(lambda: served.engine.active == 0)
    return threads


def same(engine: Any) -> Any:
    return engine


def test_lost_replicas_are_brought_back_by_the_trainers_thread_while_it_takes(serve) -> None:
    served = serve(held=[0, 1], restart=same)
    threads = lost_in_the_middle(served)
    time.sleep(0.1)
    assert threads == []  # nobody waits
    groups = served.service.take(2)
    assert all(map(complete, groups))
    assert threads == [threading.current_thread().name]


def test_lost_replicas_are_brought_back_while_the_weights_settle(serve) -> None:
    served = serve(held=[0, 1], restart=same)
    threads = lost_in_the_middle(served)
    until(lambda: bool(served.service._rescues))
    assert threads == []
    until(lambda: served.service.settle() or bool(threads))
    assert threads == [threading.current_thread().name]
    until(lambda: len(served.asked()) == 4)
    served.service.settle()
    assert all(map(complete, served.service.take(2)))
    assert len(threads) == 1


def test_replicas_that_were_brought_back_otherwise_are_not_brought_back_again(serve) -> None:
    served = serve(held=[0, 1], restart=same)
    threads = lost_in_the_middle(served)
    until(lambda: bool(served.service._rescues))
    served.engine.dead = False
    served.pool.restart([0])  # as a publication does
    assert all(map(complete, served.service.take(2)))
    assert threads == []


def test_a_rescue_that_fails_fails_take_and_later_ones_try_again(serve) -> None:
    served = serve(held=[0, 1], restart=same)
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
    assert all(map(complete, served.service.take(2)))


def test_closing_does_not_wait_for_replicas_that_nobody_brings_back(serve) -> None:
    served = serve(held=[0, 1], restart=same)
    threads = lost_in_the_middle(served)
    until(lambda: bool(served.service._rescues))
    began = time.monotonic()
    served.service.close()
    assert time.monotonic() - began < 5.0
    assert threads == []


# -- a version boundary -------------------------------------------------------------------------


def test_running_requests_end_before_the_block_and_further_ones_begin_after_it(serve) -> None:
    served = serve(held=[0])
    served.service.admit(groups_of(0))
    until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with served.service.held():
        assert served.engine.active == 0
        served.service.admit(groups_of(1))
        until(lambda: len(served.asked()) == 2)
        time.sleep(0.05)
        versions = [served.engine.version]
        served.engine.versions.append(7)
    groups = served.service.take(2)
    made = [{int(v) for s in g.samples for v in s.completion.weight_versions} for g in groups]
    assert made == [set(versions), {7}]


def test_a_group_with_further_requests_gets_them_after_the_block(serve) -> None:
    """The replica that has its request fails after the block began; what is missing is asked for again."""
    served = serve(script=Script(fails_after=(1,)), held=[0], max_failures=9)
    other = Engine()
    served.pool.join(other)
    served.service.admit(groups_of(0))
    until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with served.service.held():
        until(lambda: len(other.requests) == 1)
        time.sleep(0.05)
        other.versions.append(7)
    [group] = served.service.take(1)
    assert [int(s.completion.weight_versions[0]) for s in group.samples] == [0, 7]


def test_replicas_lost_while_the_block_waits_for_them_are_brought_back_after_it(serve) -> None:
    served = serve(held=[0, 1], restart=same)
    threads: list[str] = []

    def rescue(lost: Sequence[Any]) -> None:
        threads.append(threading.current_thread().name)
        served.engine.dead = False
        served.pool.restart([0])

    served.service.bring_back_with(rescue)
    served.service.admit(groups_of(0, 1))
    until(lambda: served.engine.active == 2)
    threading.Timer(0.1, setattr, (served.engine, "dead", True)).start()
    with served.service.held():
        assert served.engine.active == 0
        until(lambda: bool(served.service._rescues))
        assert threads == []
        served.engine.held.clear()
    until(lambda: served.service.settle() or bool(threads))
    assert threads == [threading.current_thread().name]
    assert all(map(complete, served.service.take(2)))


def test_a_replica_that_cannot_pause_is_at_fault_and_the_block_begins(serve) -> None:
    class Silent(Engine):
        async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
            raise RolloutError("no answer")

    served = serve(held=[0])
    served.pool.join(Silent())
    served.service.admit(groups_of(0))
    until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with served.service.held():
        assert [str(fault) for fault in served.pool.lost()] == ["replica 1: no answer"]
    assert all(map(complete, served.service.take(1)))


def test_the_block_ends_with_an_error_and_generation_goes_on(serve) -> None:
    served = serve(held=[0])
    served.service.admit(groups_of(0))
    until(lambda: served.engine.active == 1)
    threading.Timer(0.1, served.engine.held.clear).start()
    with pytest.raises(ValueError, match="torn"), served.service.held():
        raise ValueError("torn")
    served.service.admit(groups_of(1))
    assert all(map(complete, served.service.take(2)))


def test_where_nothing_runs_the_engine_is_not_paused(serve) -> None:
    served = serve()
    with served.service.held():
        pass
    served.service.admit(groups_of(0))
    served.service.take(1)
    with served.service.held():
        pass
    assert served.engine.paused == 0


def test_weights_do_not_wait_for_samples_that_are_only_being_scored(serve) -> None:
    served = serve()
    served.manager.seconds = 600.0
    served.service.admit(groups_of(0))
    until(lambda: served.manager.running == 2)
    began = time.monotonic()
    with served.service.held():
        assert time.monotonic() - began < 10.0
        assert served.manager.running == 2


# -- time ---------------------------------------------------------------------------------------


def test_seconds_say_what_of_scoring_generation_did_not_hide(serve) -> None:
    served = serve(script=Script(delay=0.1))
    served.manager.seconds = 0.2
    served.service.admit([group_of(0, n=1)])
    served.service.take(1)
    seconds = served.service.seconds()
    assert set(seconds) == {
        "time/rollout/generation",
        "time/rollout/scoring",
        "time/rollout/scoring_left",
    }
    assert 0.05 < seconds["time/rollout/generation"] < 5.0
    assert 0.1 < seconds["time/rollout/scoring"] < 5.0
    assert 0.1 < seconds["time/rollout/scoring_left"] < 5.0
    assert set(served.service.seconds().values()) == {0.0}


def test_scoring_beside_generation_is_hidden(serve) -> None:
    served = serve(held=[1])
    served.manager.seconds = 0.1
    served.service.admit([group_of(0, n=1), group_of(1, n=1)])
    until(lambda: not served.service._admitted[0].finished)
    until(lambda: served.service._admitted[0].finished)
    served.manager.seconds = 0.0
    served.engine.held.clear()
    served.service.take(2)
    seconds = served.service.seconds()
    assert seconds["time/rollout/scoring"] > 0.09
    assert seconds["time/rollout/generation"] > 0.09
    assert seconds["time/rollout/scoring_left"] < seconds["time/rollout/scoring"]


def test_seconds_of_groups_that_still_run_are_not_left_out(serve) -> None:
    served = serve(held=[1])
    served.service.admit(groups_of(0, 1))
    served.service.take(1)
    time.sleep(0.1)
    assert served.service.seconds()["time/rollout/generation"] > 0.05
    assert served.service.seconds()["time/rollout/generation"] < LONG


def test_the_manager_sleeps_when_nothing_runs_any_more_and_not_before(serve) -> None:
    served = serve(held=[1])
    served.service.admit(groups_of(0, 1))
    served.service.take(1)
    assert served.manager.slept == []
    served.manager.seconds = 0.05
    served.engine.held.clear()
    served.service.take(1)
    assert served.manager.slept == [0]
    served.service.generate(groups_of(2, 3))
    assert served.manager.slept == [0, 0]


# -- the end ------------------------------------------------------------------------------------


def test_closing_ends_everything_that_runs_and_may_be_repeated(serve) -> None:
    served = serve(held=[0])
    served.manager.seconds = 600.0
    served.service.admit(groups_of(0, 1))
    until(lambda: served.manager.running == 2)
    served.service.close()
    assert served.quiet()
    assert served.manager.slept == [0]
    assert not [t for t in threading.enumerate() if t.name == "dovetail-rollout" and t.is_alive()]
    served.service.close()
    with pytest.raises(RolloutError, match="event loop has ended"):
        served.service.take(1)
