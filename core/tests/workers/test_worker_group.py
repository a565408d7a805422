"""Worker groups: the other modes, futures, and one clear error for a failing worker."""

from __future__ import annotations

import gc
import logging
import pickle
from contextlib import closing

import pytest

from dovetail.batch import Batch
from dovetail.dispatch import Dispatch, Future, Mesh, ModeSpec, Worker, register
from dovetail.errors import (
    ColumnError,
    DispatchError,
    PluginNotFoundError,
    StopRequested,
    WorkerError,
)
from dovetail.interfaces import Plugin
from dovetail.sections import PluginSection
from dovetail.workers import RankFailure
from dovetail_sdk.testing import SimulatedGroup


class Engine(Worker, Plugin):
    closed = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self, prefix=""):
        """Say the rank."""
        return f"{prefix}{self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self):
        return None

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def scatter(self, value, *, scale=(1, 1, 1, 1)):
        return None if value is None else value * scale

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def lead(self, value):
        return (self.rank, value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, errors):
        if self.rank in errors:
            raise errors[self.rank]

    @register(dispatch_mode=ModeSpec.of("no_such_mode"))
    def odd(self):
        return None

    def helper(self):
        return None

    def close(self):
        type(self).closed += 1


@pytest.fixture
def group():
    return SimulatedGroup(Engine, Mesh(dp=2, tp=2), PluginSection(), role="actor")


def test_one_to_all(group):
    assert group.where().result() == ["0", "1", "2", "3"]
    assert group.where(prefix="r").result() == ["r0", "r1", "r2", "r3"]
    assert group.offload().result() is None


def test_all_to_all(group):
    assert group.scatter([1, 2, 3, 4], scale=[1, 10, 100, 1000]).result() == [1, 20, 300, 4000]
    assert group.scatter([None] * 4, scale=(1,) * 4).result() is None
    with pytest.raises(DispatchError, match=r"argument 0 must.*list .* each of the 4 ranks, not 3"):
        group.scatter([1, 2, 3], scale=[1] * 4)
    with pytest.raises(DispatchError, match=r"argument 'scale' .* not int"):
        group.scatter([1] * 4, scale=2)


def test_rank_zero(group):
    assert group.lead("x").result() == (0, "x")
    method, calls = group.calls[-1]
    assert method == "lead"
    assert calls == [(("x",), {}), None, None, None]


def test_methods_appear_with_their_names_and_docstrings(group):
    assert group.where.__name__ == "where"
    assert group.where.__doc__ == "Say the rank."
    assert {"where", "lead", "scatter"} <= set(dir(group))
    assert not hasattr(group, "helper")
    assert repr(group).startswith("SimulatedGroup(actor: Engine on Mesh(dp=2 × tp=2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wher",
            "has no method 'wher'; its registered methods are: fail, .*\n.*did you mean 'where'",
        ),
        ("helper", "Engine.helper is not registered,.*call it"),
    ],
)
def test_what_is_not_registered_can_not_be_called(group, name, message):
    with pytest.raises(DispatchError, match=message):
        getattr(group, name)
    with pytest.raises(DispatchError, match=message):
        group.call(name)


def test_an_unknown_mode_is_an_error_of_the_plugin_index(group):
    with pytest.raises(PluginNotFoundError, match="no_such_mode"):
        group.odd()


def test_a_method_may_not_hide_the_groups_own():
    class Bad(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def mesh(self): ...

    with pytest.raises(DispatchError, match=r"Bad\.mesh can't be registered:.*attribute 'mesh'"):
        SimulatedGroup(lambda config, context: Bad(), Mesh())


def test_a_failing_worker_surfaces_as_one_error(group):
    future = group.fail({2: ZeroDivisionError("by nothing"), 3: ValueError("later")})
    assert future.done()
    with pytest.raises(WorkerError) as caught:
        future.result()
    error = caught.value
    assert str(error) == "actor.fail() on rank 2 of 4 failed: ZeroDivisionError: by nothing"
    assert (error.rank, error.call) == (2, "fail")
    assert "raise errors[self.rank]" in error.worker_traceback
    assert isinstance(error.__cause__, ZeroDivisionError)
    again = pickle.loads(pickle.dumps(error))
    assert again.worker_traceback == error.worker_traceback


def test_the_traceback_of_another_process_is_shown_as_a_note():
    group = SimulatedGroup(Engine, Mesh(), PluginSection(), role="actor", through_pickle=True)
    with pytest.raises(WorkerError) as caught:
        group.fail({0: ZeroDivisionError("by nothing")}).result()
    assert any("raise errors[self.rank]" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("through_pickle", [False, True])
def test_an_error_of_dovetails_own_keeps_its_type_and_message(through_pickle):
    group = SimulatedGroup(Engine, Mesh(dp=2), role="actor", through_pickle=through_pickle)
    with pytest.raises(ColumnError) as caught:
        group.fail({1: ColumnError("no column 'x'", hint="add it")}).result()
    assert str(caught.value) == "no column 'x'\n  → add it"
    assert "raised in actor.fail() on rank 1 of 2" in caught.value.__notes__


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StopRequested("stop")])
def test_stopping_passes_through_at_once(group, error):
    with pytest.raises(type(error)):
        group.fail({0: error})


def test_the_rank_that_failed_first_speaks(group):
    late = RankFailure(error=TimeoutError("peer is gone"), traceback="…", failed_at=9.0)
    first = RankFailure(error=ValueError("the cause"), traceback="…", failed_at=5.0)
    group._invoke = lambda method, calls: Future.completed([late, late, late, first])
    with pytest.raises(WorkerError, match=r"rank 3 of 4 failed:.*the cause"):
        group.where().result()


def test_a_failure_that_nobody_asks_for_is_logged(group, caplog):
    with caplog.at_level(logging.ERROR, logger="dovetail"):
        group.fail({0: ValueError("unheard")})
        gc.collect()
    assert "never asked for: actor.fail() on rank 0 of 4 failed" in caplog.text


def test_a_future_waits_once_and_can_be_asked_again():
    asked = []

    def wait(timeout):
        asked.append(timeout)
        if timeout is not None:
            raise TimeoutError
        return 3

    future = Future(wait).then(lambda value: value + 1)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.1)
    assert future.result() == 4
    assert future.result() == 4
    assert future.done()
    assert asked == [0.1, None]


def test_a_future_keeps_its_error():
    def wait(timeout):
        raise ValueError("gone")

    future = Future(wait)
    for _ in range(2):
        with pytest.raises(ValueError, match="gone"):
            future.result()


def test_leaving_a_group_closes_every_worker():
    Engine.closed = 0
    with closing(SimulatedGroup(Engine, Mesh(dp=3), PluginSection())) as group:
        assert group.where().result() == ["0", "1", "2"]
    assert Engine.closed == 3


def test_arguments_and_results_survive_another_process():
    group = SimulatedGroup(Engine, Mesh(), PluginSection(), through_pickle=True)
    batch = Batch({"x": ["a"]})
    rank, received = group.lead(batch).result()
    assert rank == 0
    assert received.equals(batch)
    assert received is not batch
