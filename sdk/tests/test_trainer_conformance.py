"""The suite for trainers finds faults of trainers."""

from __future__ import annotations

import inspect

import pytest

from dovetail.errors import DovetailError, StopRequested
from dovetail.interfaces import Run, Trainer
from dovetail.sections import TrainerSection
from dovetail_sdk.testing.conformance import TrainerConformance


class OnPolicy(Trainer):
    """Publishes after each learn, and saves at the end."""

    name = "good"
    api = ">=2.0,<3"
    Config = TrainerSection

    def run(self, run: Run) -> None:
        run.publish_weights()
        if self.config.validate_before:
            run.validate()
        while not run.position.finished:
            self.step(run)
            self.after(run)
        run.save()
        if self.config.validate_after:
            run.validate()

    def step(self, run):
        with run.step() as step:
            run.collect(step)
            run.learn(step)
            run.publish_weights()

    def after(self, run):
        done, config = run.position.step, self.config
        if config.validate_every and done % config.validate_every == 0:
            run.validate()
        if config.save_every and done % config.save_every == 0:
            run.save()


class TestOnPolicy(TrainerConformance):
    plugin = OnPolicy


class TwoStepsAWeight(OnPolicy):
    """Publishes after every other learn, which it counts over resumes."""

    name = "lagging"

    @classmethod
    def max_staleness(cls, config):
        return 1

    learned = 0

    def step(self, run):
        with run.step() as step:
            run.collect(step)
            run.learn(step)
        self.learned += 1
        if self.learned % 2 == 0:
            run.publish_weights()

    def state(self):
        return {"learned": self.learned}

    def load_state(self, state):
        self.learned = state["learned"]


class TestTwoStepsAWeight(TrainerConformance):
    plugin = TwoStepsAWeight


class NeverPublishing(OnPolicy):
    @classmethod
    def max_staleness(cls, config):
        return 1

    def run(self, run):
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
        run.save()


class PublishingOnce(OnPolicy):
    def step(self, run):
        with run.step() as step:
            run.collect(step)
            run.learn(step)


class PublishingLate(OnPolicy):
    """The last weights are never published."""

    def run(self, run):
        while not run.position.finished:
            run.publish_weights()
            with run.step() as step:
                run.collect(step)
                run.learn(step)
        run.save()


class NeverLearning(OnPolicy):
    def step(self, run):
        with run.step() as step:
            run.collect(step)


class Swallowing(OnPolicy):
    """Takes a stop, and any error, for the end."""

    def run(self, run):
        try:
            super().run(run)
        except DovetailError:
            run.save()


class Retrying(OnPolicy):
    def step(self, run):
        try:
            super().step(run)
        except StopRequested:
            raise
        except DovetailError:
            super().step(run)


class FromTheStart(OnPolicy):
    def run(self, run):
        run.publish_weights()
        for _ in range(run.position.total_steps):
            self.step(run)
        run.save()


class OneStepShort(OnPolicy):
    def run(self, run):
        run.publish_weights()
        while run.position.step < run.position.total_steps - 1:
            self.step(run)
        run.save()


class AlwaysOneStep(OnPolicy):
    def run(self, run):
        run.publish_weights()
        while True:
            self.step(run)
            if run.position.finished:
                break
        run.save()


class Unsaved(OnPolicy):
    def run(self, run):
        run.publish_weights()
        while not run.position.finished:
            self.step(run)


class SavingBefore(OnPolicy):
    """Its last checkpoint is of the step before the last."""

    def run(self, run):
        run.publish_weights()
        while not run.position.finished:
            run.save()
            self.step(run)


class KeepingNoSchedule(OnPolicy):
    def after(self, run):
        pass


class AlwaysValidating(OnPolicy):
    def after(self, run):
        run.validate()
        run.save()


class NeverValidating(OnPolicy):
    def run(self, run):
        run.publish_weights()
        while not run.position.finished:
            self.step(run)
            self.after(run)
        run.save()


class Prying(OnPolicy):
    def run(self, run):
        self.last = getattr(run, "_step", 0)
        super().run(run)


class Forgetful(TwoStepsAWeight):
    def load_state(self, state):
        pass


class Unkept(OnPolicy):
    def state(self):
        return {"seen": {1, 2}}


@pytest.mark.parametrize(
    ("trainer", "test"),
    [
        (NeverPublishing, "test_weights_are_published_before_the_first_samples"),
        (PublishingOnce, "test_weights_are_published_after_each_learn"),
        (PublishingLate, "test_weights_are_published_after_each_learn"),
        (NeverLearning, "test_it_takes_every_step_in_order"),
        (OneStepShort, "test_it_takes_every_step_in_order"),
        (FromTheStart, "test_a_resumed_run_takes_the_steps_that_are_left"),
        (AlwaysOneStep, "test_a_finished_run_takes_no_further_step"),
        (Unsaved, "test_the_run_is_saved_at_its_end"),
        (SavingBefore, "test_the_run_is_saved_at_its_end"),
        (Swallowing, "test_a_stop_passes_wherever_it_is_asked_for"),
        (Swallowing, "test_an_error_of_learn_passes"),
        (Retrying, "test_an_error_of_learn_passes"),
        (KeepingNoSchedule, "test_it_validates_when_its_config_says"),
        (KeepingNoSchedule, "test_it_saves_as_often_as_its_config_says"),
        (AlwaysValidating, "test_it_validates_when_its_config_says"),
        (NeverValidating, "test_it_validates_when_its_config_says"),
        (Prying, "test_it_uses_what_is_public_of_a_run"),
        (Forgetful, "test_its_state_goes_through_a_checkpoint_and_brings_it_back"),
        (Unkept, "test_its_state_goes_through_a_checkpoint_and_brings_it_back"),
    ],
)
def test_a_faulty_trainer_is_caught(trainer, test, tmp_path):
    suite = type("Suite", (TrainerConformance,), {"plugin": trainer})()
    check = getattr(suite, test)
    given = (tmp_path,) if "tmp_path" in inspect.signature(check).parameters else ()
    with pytest.raises((AssertionError, DovetailError, pytest.fail.Exception)):
        check(*given)
