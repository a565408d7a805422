"""The on-policy trainer: the order of a step, and when it validates and saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from dovetail.interfaces import PluginContext, Run, RunPosition, StepContext
from dovetail.sections import TrainerSection
from dovetail_trainers.on_policy import OnPolicyTrainer

STEP = ["collect", "learn", "publish"]


class NotedRun(Run):
    """A run without workers: it counts steps and notes what it is asked for.

    Attributes:
        calls: in order.
    """

    def __init__(self, steps: int, *, done: int = 0) -> None:
        self.steps, self.done = steps, done
        self.calls: list[str] = []

    @property
    def position(self) -> RunPosition:
        return RunPosition(
            step=self.done,
            total_steps=self.steps,
            epoch=0.0,
            weight_version=0,
            validated=self.done > 0,
        )

    @contextmanager
    def step(self) -> Iterator[Any]:
        yield None
        self.done += 1

    def admit(self, groups: int | None = None) -> None:
        self.calls.append("admit")

    def collect(self, step: StepContext) -> None:
        self.calls.append("collect")

    def learn(self, step: StepContext) -> None:
        self.calls.append("learn")

    def publish_weights(self) -> None:
        self.calls.append("publish")

    def validate(self) -> Mapping[str, float]:
        self.calls.append(f"validate after {self.done}")
        return {}

    def save(self) -> None:
        self.calls.append(f"save after {self.done}")


NEVER = {
    "validate_before": False,
    "validate_after": False,
    "validate_every": 0,
    "save_every": 0,
    "save_last": False,
}


def calls(run: NotedRun, **settings: Any) -> list[str]:
    """What the trainer asks of a run; nothing but steps unless a setting says so."""
    config = TrainerSection(name="on_policy", **{**NEVER, **settings})
    OnPolicyTrainer(config, PluginContext()).run(run)
    return run.calls


def test_weights_are_published_before_the_first_step_and_in_each() -> None:
    assert calls(NotedRun(2)) == ["publish", *STEP, *STEP]


def test_a_resumed_run_takes_the_steps_that_are_left() -> None:
    assert calls(NotedRun(3, done=2)) == ["publish", *STEP]
    assert calls(NotedRun(3, done=3)) == ["publish"]


@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({"validate_before": True}, ["validate after 0"]),
        ({"validate_after": True}, ["validate after 4"]),
        ({"save_last": True}, ["save after 4"]),
        ({"validate_every": 2}, ["validate after 2"]),
        ({"save_every": 3}, ["save after 3"]),
        ({"save_last": True, "validate_after": True}, ["save after 4", "validate after 4"]),
    ],
)
def test_it_validates_and_saves_when_the_config_says_so(
    settings: dict[str, Any], when: list[str]
) -> None:
    """What is due after the last step is left to `save_last` and `validate_after`."""
    made = calls(NotedRun(4), **settings)
    assert [call for call in made if " after " in call] == when


def test_a_resumed_run_is_not_validated_again_before_its_first_step() -> None:
    made = calls(NotedRun(2, done=1), validate_before=True)
    assert made == ["publish", *STEP]
