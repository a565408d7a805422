"""The suite of runs, as their trainers see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import pytest

from dovetail.errors import NumericsError, PluginBrokenError
from dovetail.interfaces import Run, StepContext


class RunConformance:
    """Conformance suite for implementations of `Run`, whose steps a trainer drives: subclass it and override `make_run`."""

    def make_run(
        self, steps: int, *, learn_error: Exception | None = None, max_staleness: int = 0
    ) -> Run:
        """Return a new run of `steps` steps, in which the same seed gives the same samples.

        Args:
            steps: the number of steps of the whole run; at most 3.
            learn_error: an exception that a stage raises once, in the first `learn`, before any weights have changed; None for none.
            max_staleness: the maximum age, in steps, that the run's trainer allows for weights that generate samples.
        """
        raise NotImplementedError

    @contextmanager
    def collected(self, run: Run) -> Iterator[StepContext]:
        """Yield a step that has collected its samples, and learn from them at the end of the block."""
        with run.step() as step:
            run.collect(step)
            yield step
            run.learn(step)

    @contextmanager
    def abandoned(self, run: Run) -> Iterator[StepContext]:
        """Yield a step and end its block with an error, as if the trainer had raised it."""
        with pytest.raises(_RaisedError), run.step() as step:  # noqa: PT012 - the step passes it on
            yield step
            raise _RaisedError

    def take(self, run: Run) -> None:
        """Publish the weights and run one complete step."""
        run.publish_weights()
        with self.collected(run):
            pass

    # Position

    def test_a_fresh_run_stands_at_its_start(self) -> None:
        position = self.make_run(2).position
        assert (position.step, position.total_steps, position.epoch) == (0, 2, 0)
        assert position.weight_version == 0
        assert not position.validated
        assert not position.finished

    def test_a_step_counts_after_learn(self) -> None:
        run = self.make_run(2)
        run.publish_weights()
        with run.step() as step:
            assert step.number == 1
            run.collect(step)
            assert run.position.step == 0
            run.learn(step)
        assert run.position.step == 1
        assert not run.position.finished
        self.take(run)
        assert run.position.step == 2
        assert run.position.finished

    def test_the_first_validation_has_no_time_left_after_a_step(self) -> None:
        run = self.make_run(2)
        self.take(run)
        assert run.position.validated

    # Experience

    def test_collect_gives_the_samples_with_their_columns(self) -> None:
        run = self.make_run(1)
        run.publish_weights()
        with self.collected(run) as step:
            experience = step.experience
            names = [sample.sample_id for sample in experience.samples]
            assert names
            assert len(set(names)) == len(names)
            batch = experience.batch()
            assert set(batch["sample_id"]) <= set(names)
            assert len(batch["response_ids"]) == len(batch["scores"]) == len(batch)

    def test_steps_have_different_samples(self) -> None:
        run = self.make_run(2)
        seen: list[list[str]] = []
        for _ in range(2):
            run.publish_weights()
            with self.collected(run) as step:
                seen.append(_samples(step))
        assert not set(seen[0]) & set(seen[1])

    # Steps that leave no trace

    def test_the_prompts_of_a_step_that_raises_before_learn_are_issued_again(self) -> None:
        self.assert_no_trace(self.make_run(2), _raise, _RaisedError)

    def test_the_prompts_of_a_step_whose_learn_raises_are_issued_again(self) -> None:
        run = self.make_run(2, learn_error=NumericsError("a scripted error"))
        self.assert_no_trace(run, lambda run, step: run.learn(step), NumericsError)

    def test_a_step_without_learn_is_refused_and_its_prompts_are_issued_again(self) -> None:
        self.assert_no_trace(self.make_run(2), _leave, PluginBrokenError)

    def assert_no_trace(
        self, run: Run, ends: Callable[[Run, StepContext], None], error: type[Exception]
    ) -> None:
        """Assert that a step which `ends` breaks off after `collect` raises `error` and leaves no trace.

        The next step must have the same number and the same samples.

        Args:
            run: the run under test.
            ends: a function that is called after `collect` and breaks off the step.
            error: the type of the expected error.
        """
        run.publish_weights()
        before = run.position
        samples: list[str] = []

        def take() -> None:
            with run.step() as step:
                run.collect(step)
                samples.extend(_samples(step))
                ends(run, step)

        with pytest.raises(error):
            take()
        assert samples
        # `admissible` differs, since queued prompts that no step has taken count against the limit.
        assert attrs.evolve(run.position, admissible=before.admissible) == before
        with run.step() as step:
            assert step.number == before.step + 1
            run.collect(step)
            assert _samples(step) == samples
            run.learn(step)
        assert run.position.step == before.step + 1

    def test_a_step_that_raises_after_learn_counts(self) -> None:
        run = self.make_run(2)
        run.publish_weights()
        with self.abandoned(run) as step:
            run.collect(step)
            run.learn(step)
        assert run.position.step == 1
        run.publish_weights()
        with self.collected(run) as step:
            assert step.number == 2

    # Calls in a wrong order

    @pytest.mark.parametrize(
        "calls",
        [("learn",), ("collect", "collect"), ("collect", "learn", "learn"), ("step",)],
        ids=["learn before collect", "collect twice", "learn twice", "a step in a step"],
    )
    def test_calls_in_a_wrong_order_are_refused(self, calls: Sequence[str]) -> None:
        run = self.make_run(2)
        run.publish_weights()
        with self.abandoned(run) as step:
            for call in calls[:-1]:
                getattr(run, call)(step)
            with pytest.raises(PluginBrokenError):
                self.begin(run) if calls[-1] == "step" else getattr(run, calls[-1])(step)

    def begin(self, run: Run) -> None:
        """Try to begin a step that the run should refuse; fail the test if the step begins."""
        with run.step() as step:
            pytest.fail(f"step {step.number} began; expected PluginBrokenError")

    def test_a_step_past_the_end_is_refused(self) -> None:
        run = self.make_run(1)
        self.take(run)
        with pytest.raises(PluginBrokenError):
            self.begin(run)

    def test_a_step_that_is_over_is_refused(self) -> None:
        run = self.make_run(2)
        self.take(run)
        run.publish_weights()
        with self.abandoned(run) as over:
            pass
        with run.step() as step:
            with pytest.raises(PluginBrokenError):
                run.collect(over)
            run.collect(step)
            with pytest.raises(PluginBrokenError):
                run.learn(over)
            run.learn(step)
        assert run.position.step == 2

    # Weights

    def test_collect_is_refused_before_weights_were_published(self) -> None:
        run = self.make_run(2)
        self.assert_refused(run)
        assert run.position.step == 0

    def test_collect_is_refused_after_weights_moved(self) -> None:
        run = self.make_run(2)
        self.take(run)
        self.assert_refused(run)
        assert run.position.step == 1

    def assert_refused(self, run: Run) -> None:
        """Begin a step, and assert that the run refuses to collect samples for it: `collect` raises PluginBrokenError."""
        with self.abandoned(run) as step, pytest.raises(PluginBrokenError):
            run.collect(step)

    def test_collect_takes_weights_as_old_as_the_trainer_allows(self) -> None:
        run = self.make_run(3, max_staleness=1)
        self.take(run)
        version = run.position.weight_version
        with self.collected(run) as step:
            assert step.weight_version == version
        assert run.position.weight_version == version
        self.assert_refused(run)

    def test_a_resumed_or_fresh_run_needs_weights_whatever_the_trainer_allows(self) -> None:
        self.assert_refused(self.make_run(2, max_staleness=1))

    # Samples that are generated ahead

    def test_as_many_prompts_are_admissible_as_may_be_admitted(self) -> None:
        run = self.make_run(4, max_staleness=1)
        assert run.position.admissible == 0
        run.publish_weights()
        assert run.position.admissible > 0
        run.admit(run.position.admissible)
        assert run.position.admissible == 0
        with pytest.raises(PluginBrokenError):
            run.admit(1)
        with run.step() as step:
            run.collect(step)
            assert run.position.admissible == 0
            run.learn(step)
            assert run.position.admissible == 0
            run.publish_weights()
            assert run.position.admissible > 0

    def test_what_was_admitted_is_collected_with_the_weights_of_then(self) -> None:
        run = self.make_run(2, max_staleness=1)
        run.publish_weights()
        with self.collected(run) as step:
            first = _samples(step)
            run.admit()
        run.publish_weights()
        version = run.position.weight_version
        with self.collected(run) as step:
            assert not set(first) & set(_samples(step))
            rows = step.experience.batch()["token_weight_versions"]
            assert {int(v) for row in rows for v in row} == {version - 1}
            assert step.weight_version == version
        assert run.position.finished

    def test_samples_ahead_are_bounded_by_the_staleness(self) -> None:
        run = self.make_run(3, max_staleness=1)
        run.publish_weights()
        with self.collected(run):
            run.admit()
            with pytest.raises(PluginBrokenError):
                run.admit()
        assert run.position.step == 1

    def test_an_on_policy_run_admits_nothing_ahead(self) -> None:
        run = self.make_run(2)
        run.publish_weights()
        with self.collected(run), pytest.raises(PluginBrokenError):
            run.admit()

    def test_nothing_is_admitted_beyond_the_last_step(self) -> None:
        run = self.make_run(1, max_staleness=1)
        run.publish_weights()
        with self.collected(run):
            for _ in range(3):
                run.admit()
        run.admit()
        assert run.position.finished

    def test_what_was_admitted_is_there_after_a_step_that_failed(self) -> None:
        run = self.make_run(2, max_staleness=1)
        run.publish_weights()
        with self.abandoned(run) as step:
            run.collect(step)
            failed = _samples(step)
            run.admit()
        for number in (1, 2):
            with self.collected(run) as step:
                assert (_samples(step) == failed) == (number == 1)
            run.publish_weights()
        assert run.position.finished

    def test_publishing_gives_a_new_version_where_weights_moved_and_only_there(self) -> None:
        run = self.make_run(2)
        versions = [run.position.weight_version]
        run.publish_weights()
        versions.append(run.position.weight_version)
        run.publish_weights()
        assert run.position.weight_version == versions[-1]
        self.take(run)
        assert run.position.weight_version == versions[-1]
        run.publish_weights()
        versions.append(run.position.weight_version)
        assert versions == sorted(set(versions))

    # Validation and checkpoints

    def test_validation_gives_finite_metrics_and_does_not_move_the_run(self) -> None:
        run = self.make_run(1)
        run.publish_weights()
        before = run.position
        metrics = run.validate()
        assert all(isinstance(name, str) and "/" in name for name in metrics)
        assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
        after = run.position
        assert (after.step, after.weight_version) == (before.step, before.weight_version)
        assert after.validated or not metrics

    def test_validation_is_refused_before_the_actors_weights_are_published(self) -> None:
        run = self.make_run(1)
        with pytest.raises(PluginBrokenError):
            run.validate()

    def test_saving_twice_is_no_error_and_does_not_move_the_run(self) -> None:
        run = self.make_run(2)
        self.take(run)
        before = run.position
        run.save()
        run.save()
        assert run.position == before
        self.take(run)

    def test_validation_and_checkpoints_are_refused_inside_a_step(self) -> None:
        run = self.make_run(1)
        run.publish_weights()
        with run.step() as step:
            run.collect(step)
            run.learn(step)
            run.publish_weights()
            with pytest.raises(PluginBrokenError):
                run.validate()
            with pytest.raises(PluginBrokenError):
                run.save()
        run.validate()
        run.save()
        assert run.position.finished


class _RaisedError(Exception):
    """An error that a trainer's `with` block raises."""


def _raise(_run: Run, _step: StepContext) -> None:
    raise _RaisedError


def _leave(_run: Run, _step: StepContext) -> None:
    """Leave the `with` block without an error."""


def _samples(step: StepContext) -> list[str]:
    """Return the names of the step's samples, sorted, since samples may finish in any order."""
    return sorted(sample.sample_id for sample in step.experience.samples)
