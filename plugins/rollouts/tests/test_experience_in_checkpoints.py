"""Samples in a checkpoint: the resumed run trains on finished samples, and does not generate them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import StopRequested
from dovetail.interfaces import Run, Trainer
from dovetail.sections import TrainerSection


class OneStepOff(Trainer):
    name = "one_step_off"
    api = ">=2.0,<3"
    Config = TrainerSection

    @classmethod
    def max_staleness(cls, config: Any) -> int:
        return 1

    def run(self, run: Run) -> None:
        run.publish_weights()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.admit()
                run.learn(step)
                run.publish_weights()


def asked(made: Any) -> list[int]:
    return sorted(request.streams[0].prompt for request in made.engine.requests)


def names(made: Any) -> list[str]:
    return [s.sample_id for s in made.run._current.collected.samples]


def latest(directory: Path) -> Path:
    return max((directory / "run" / "checkpoints").glob("step_*"))


def ended(made: Any, error: type[Exception]) -> list[str]:
    """Take a step, raise this error in the next step once its samples are collected, and return the samples' names."""
    found: list[str] = []

    def run() -> None:
        with made.run.record.running():
            made.run.publish_weights()
            made.step()
            with made.run.step() as step:
                made.run.collect(step)
                found.extend(names(made))
                raise error("here")

    with pytest.raises(error):
        run()
    return found


def collected(again: Any) -> list[str]:
    """Train a restored run's next step, and return the names of the step's samples."""
    with again.run.record.running():
        again.run.publish_weights()
        with again.run.step() as step:
            again.run.collect(step)
            found = names(again)
            again.run.learn(step)
    again.ledger.check(in_flight=True)
    return found


def test_a_step_that_was_stopped_comes_again_with_its_samples(compose, tmp_path) -> None:
    before = ended(compose(), StopRequested)
    again = compose(directory="again")
    again.run.restore(latest(tmp_path))
    assert collected(again) == before
    assert asked(again) == []


def test_after_an_error_samples_are_generated_again(compose, tmp_path) -> None:
    before = ended(compose(), ValueError)
    again = compose(directory="again")
    again.run.restore(latest(tmp_path))
    assert collected(again) == before
    assert asked(again) == [2, 3]


@pytest.mark.parametrize("override", ["rollout.n=3", "rollout.temperature=0.5", "reward.timeout=9"])
def test_samples_that_would_be_drawn_or_scored_otherwise_are_generated_again(
    compose, tmp_path, override
) -> None:
    ended(compose(), StopRequested)
    again = compose(override, directory="again")
    again.run.restore(latest(tmp_path))
    collected(again)
    assert asked(again) == [2, 3]


def save_one_step_ahead(made: Any) -> None:
    """Take a step, and save once the next step's samples are complete."""
    with made.run.record.running():
        made.run.publish_weights()
        with made.run.step() as step:
            made.run.collect(step)
            made.run.admit()
            made.run.learn(step)
            made.run.publish_weights()
        # Wait until these groups are generated.
        made.run.source._service.generate(list(made.run.source._service._admitted))
        made.run.save()
        made.run.record.finish_save()
    assert asked(made) == [0, 1, 2, 3]


def test_what_was_generated_ahead_is_trained_on_after_a_resume(compose, tmp_path) -> None:
    save_one_step_ahead(compose(trainer=OneStepOff))
    again = compose(trainer=OneStepOff, directory="again")
    again.run.restore(latest(tmp_path))
    again.run.train()
    assert asked(again) == [4, 5]
    again.ledger.check()
    assert again.ledger.counts()["used"] == 6


def test_a_trainer_without_staleness_generates_anew_what_was_generated_ahead(
    compose, tmp_path
) -> None:
    save_one_step_ahead(compose(trainer=OneStepOff))
    again = compose(directory="again")
    again.run.restore(latest(tmp_path))
    again.take(2)
    assert asked(again) == [2, 3, 4, 5]
    again.ledger.check()
    assert again.ledger.counts()["used"] == 6


def test_a_resumed_run_serves_its_weights_under_the_version_that_they_had(
    compose, tmp_path
) -> None:
    made = compose()
    made.take(1)
    made.run.save()
    made.run.record.finish_save()
    version = made.run.position.weight_version
    again = compose(directory="again")
    again.run.restore(latest(tmp_path))
    again.run.publish_weights()
    assert again.run.position.weight_version == version
    assert again.engine.versions == [version]


def test_weights_that_moved_before_the_checkpoint_are_a_version_of_their_own(
    compose, tmp_path
) -> None:
    made = compose()
    with made.run.record.running():
        made.run.publish_weights()
        with made.run.step() as step:
            made.run.collect(step)
            made.run.learn(step)
        made.run.save()
        made.run.record.finish_save()
    version = made.run.position.weight_version
    again = compose(directory="again")
    again.run.restore(latest(tmp_path))
    again.run.publish_weights()
    assert again.run.position.weight_version == version + 1
