"""The scripted run conforms to `Run`, and the suite of runs finds runs that don't conform."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from dovetail.errors import NumericsError, PluginBrokenError, StopRequested
from dovetail.interfaces import Run
from dovetail_sdk.testing import ScriptedRun
from dovetail_sdk.testing.conformance import RunConformance


class TestScriptedRun(RunConformance):
    def make_run(self, steps, *, learn_error=None, max_staleness=0) -> Run:
        return ScriptedRun(steps, learn_error=learn_error, max_staleness=max_staleness)


class CountingAtOnce(ScriptedRun):
    """A step counts from its start."""

    @contextmanager
    def step(self):
        with super().step() as step:
            self._step = step.number
            yield step


class Forgiving(ScriptedRun):
    """A step may end without `learn`."""

    @contextmanager
    def step(self):
        with super().step() as step:
            yield step
            if step.number not in self.learned:
                self.learned.append(step.number)


class MovingOn(ScriptedRun):
    """The prompts of a step that failed are not issued again."""

    issued = 0

    def collect(self, step):
        self.issued += 1
        number, step.number = step.number, self.issued
        super().collect(step)
        step.number = number


class Losing(ScriptedRun):
    """A step that raises after `learn` does not count."""

    @contextmanager
    def step(self):
        before = self._step
        try:
            with super().step() as step:
                yield step
        except Exception:
            self._step = before
            raise


class Unchecked(ScriptedRun):
    """Samples come from whatever weights the rollout holds."""

    def collect(self, step):
        self._max_staleness, self._published = 9, True
        super().collect(step)


class Strict(ScriptedRun):
    """The rollout must hold the actor's weights, whatever the trainer says."""

    def __init__(self, *arguments, max_staleness=0, **named):
        super().__init__(*arguments, **named)


class Republishing(ScriptedRun):
    """Every publication is a new version."""

    def publish_weights(self):
        self._published = False
        super().publish_weights()


class Moving(ScriptedRun):
    """Validation and checkpoints move the run."""

    def validate(self):
        self._version += 1
        return super().validate()

    def save(self):
        super().save()
        self._version += 1


class Words(ScriptedRun):
    """Metrics are not numbers."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, validation={"val/mean@1": "good"}, **named)


class Repeating(ScriptedRun):
    """Every step is about the same prompts."""

    def collect(self, step):
        number, step.number = step.number, 1
        super().collect(step)
        step.number = number


class Refilling(ScriptedRun):
    """A second collection takes the place of the first."""

    def collect(self, step):
        step.collected = None
        super().collect(step)


class Learning(ScriptedRun):
    """Learns from whatever there is."""

    def learn(self, step):
        step.updates["actor"] = 1
        self.learned.append(step.number)


class Nesting(ScriptedRun):
    """A step may begin inside of another."""

    @contextmanager
    def step(self):
        self._current = None
        with super().step() as step:
            yield step


class Endless(ScriptedRun):
    """Has one step more than it says."""

    @contextmanager
    def step(self):
        self._total_steps += 1
        with super().step() as step:
            yield step


class Deaf(ScriptedRun):
    """Errors of stages are swallowed."""

    def learn(self, step):
        try:
            super().learn(step)
        except NumericsError:
            self.learned.append(step.number)


ORDER = "test_calls_in_a_wrong_order_are_refused"


@pytest.mark.parametrize(
    ("run", "test"),
    [
        (CountingAtOnce, "test_a_step_counts_after_learn"),
        (CountingAtOnce, "test_the_prompts_of_a_step_that_raises_before_learn_are_issued_again"),
        (Forgiving, "test_a_step_without_learn_is_refused_and_its_prompts_are_issued_again"),
        (MovingOn, "test_the_prompts_of_a_step_that_raises_before_learn_are_issued_again"),
        (MovingOn, "test_the_prompts_of_a_step_whose_learn_raises_are_issued_again"),
        (MovingOn, "test_a_step_without_learn_is_refused_and_its_prompts_are_issued_again"),
        (Deaf, "test_the_prompts_of_a_step_whose_learn_raises_are_issued_again"),
        (Losing, "test_a_step_that_raises_after_learn_counts"),
        (Unchecked, "test_collect_is_refused_before_weights_were_published"),
        (Unchecked, "test_collect_is_refused_after_weights_moved"),
        (Strict, "test_collect_takes_weights_as_old_as_the_trainer_allows"),
        (
            Republishing,
            "test_publishing_gives_a_new_version_where_weights_moved_and_only_there",
        ),
        (Moving, "test_validation_gives_finite_metrics_and_does_not_move_the_run"),
        (Words, "test_validation_gives_finite_metrics_and_does_not_move_the_run"),
        (Moving, "test_saving_twice_is_no_error_and_does_not_move_the_run"),
        (Repeating, "test_steps_have_different_samples"),
        (Refilling, f"{ORDER} collect collect"),
        (Learning, f"{ORDER} learn"),
        (Learning, f"{ORDER} collect learn learn"),
        (Nesting, f"{ORDER} step"),
        (Endless, "test_a_step_past_the_end_is_refused"),
    ],
)
def test_a_faulty_run_is_caught(run, test):
    test, *calls = test.split()

    class Suite(RunConformance):
        def make_run(self, steps, **settings):
            return run(steps, **settings)

    with pytest.raises((AssertionError, PluginBrokenError, pytest.fail.Exception)):
        getattr(Suite(), test)(*([calls] if calls else []))


def test_a_stop_comes_at_the_call_of_the_script_and_leaves_no_trace():
    run = ScriptedRun(2, stop_at=4)
    with pytest.raises(StopRequested):
        TestScriptedRun().take(run)
    assert run.calls == ["publish_weights", "step", "collect", "learn"]
    assert run.position.step == 0


def test_a_step_of_another_run_is_refused():
    run = ScriptedRun(3)
    run.publish_weights()
    with pytest.raises(PluginBrokenError), run.step() as step:
        ScriptedRun(1, max_staleness=1).collect(step)
