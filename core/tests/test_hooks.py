"""Hooks: every observer is told, and one that fails stops no other."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest

from dovetail.errors import PluginBrokenError
from dovetail.hooks import HOOKS, Observers, hookimpl
from dovetail.interfaces import HookSpec, PluginContext, Tracker
from dovetail.sections import PluginSection


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    @hookimpl
    def step_finished(self, step, metrics):
        self.seen.append((step, metrics))

    @hookimpl
    def run_finished(self, summary):
        self.seen.append(summary)


class Failing:
    @hookimpl
    def step_finished(self, step):
        raise OSError(f"no room for step {step}")


class Stopping:
    @hookimpl
    def step_started(self):
        raise KeyboardInterrupt


class Tracked(Tracker):
    """Overrides two hooks, and closes badly."""

    def metrics_logged(self, step, metrics):
        self.seen = (step, metrics)

    def run_finished(self, summary):
        raise OSError("no network")


def test_observers_are_told_what_they_ask_for() -> None:
    observers, recorder = Observers(), Recorder()
    observers.add(recorder)
    observers.hook.step_finished(step=3, metrics={"reward/mean": 0.5})
    observers.hook.step_started(step=4)
    observers.hook.run_finished(summary={"status": "completed"})
    assert recorder.seen == [(3, {"reward/mean": 0.5}), {"status": "completed"}]


def test_a_failing_observer_stops_no_other_and_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observers, before, after = Observers(), Recorder(), Recorder()
    observers.add(before)
    name = observers.add(Failing(), name="the failing one")
    observers.add(after)
    with caplog.at_level(logging.WARNING, "dovetail.hooks"):
        for step in (1, 2):
            observers.hook.step_finished(step=step, metrics={})
    assert len(before.seen) == len(after.seen) == 2
    assert observers.failures == {name: 2}
    assert "one failed in step_finished: OSError:" in caplog.text
    assert "Traceback" in caplog.text


def test_ctrl_c_is_no_failure_of_an_observer() -> None:
    observers = Observers()
    observers.add(Stopping())
    with pytest.raises(KeyboardInterrupt):
        observers.hook.step_started(step=1)


def test_two_observers_of_one_class_have_names_of_their_own() -> None:
    observers = Observers()
    names = [observers.add(Recorder()) for _ in range(2)]
    assert names[1] == f"{names[0]} #2"
    assert observers.names == tuple(names)


def test_an_unknown_hook_is_refused_with_those_that_there_are() -> None:
    class Misspelt:
        @hookimpl
        def step_finishd(self, step):
            pass

    class Curious:
        @hookimpl
        def step_finished(self, loss):
            pass

    class Silent:
        def step_finished(self, step):
            pass

    class Renaming(Tracked):
        def step_finished(self, number, metrics):
            pass

    renaming = Renaming(PluginSection(name="tracked"), PluginContext())
    for observer, text in (
        (renaming, "number"),
        (Misspelt(), "unknown hook 'step_finishd'"),
        (Curious(), "loss"),
        (Silent(), "implements no hook"),
    ):
        observers = Observers()
        with pytest.raises(PluginBrokenError, match=text) as caught:
            observers.add(observer)
        assert "step_finished(step, metrics)" in str(caught.value)
        assert observers.names == ()


def test_a_tracker_follows_the_hooks_that_it_overrides(caplog: pytest.LogCaptureFixture) -> None:
    observers, tracker = Observers(), Tracked(PluginSection(name="tracked"), PluginContext())
    name = observers.add(tracker, "tracked (tracker)")
    observers.hook.step_started(step=1)
    observers.hook.metrics_logged(step=1, metrics={"reward/mean": 0.5})
    observers.hook.run_finished(summary={})
    assert tracker.seen == (1, {"reward/mean": 0.5})
    assert observers.failures == {name: 1}
    assert "tracked (tracker) failed in run_finished: OSError: no network" in caplog.text


def test_the_latest_observer_is_called_first() -> None:
    observers, order = Observers(), []
    for number in (1, 2):
        recorder = Recorder()
        recorder.seen = SimpleNamespace(append=lambda _, number=number: order.append(number))
        observers.add(recorder)
    observers.hook.run_finished(summary={})
    assert order == [2, 1]


def test_every_hook_is_documented() -> None:
    assert set(HOOKS) == {
        "run_started",
        "run_finished",
        "step_started",
        "phase_started",
        "metrics_logged",
        "samples_logged",
        "step_finished",
        "rollout_finished",
        "reward_finished",
        "stage_finished",
        "update_finished",
        "checkpoint_saved",
        "model_exported",
        "failure",
        "given_up",
    }
    for name in HOOKS:
        assert inspect.getdoc(getattr(HookSpec, name))
