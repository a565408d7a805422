"""The supervised trainer: steps over a dataset's examples, and when it validates and saves."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from dovetail.interfaces import PluginContext
from dovetail_sdk.testing import ScriptedRun
from dovetail_trainers.config import SupervisedConfig
from dovetail_trainers.supervised import SupervisedTrainer

Kind = Literal["conversations", "preferences"]


def calls(steps: int, *, done: int = 0, **settings: Any) -> list[str]:
    """The trainer's calls of a run."""
    config = SupervisedConfig(name="supervised", **settings)
    run = ScriptedRun(steps, step=done, examples=SupervisedTrainer.examples(config))
    SupervisedTrainer(config, PluginContext()).run(run)
    return run.calls


STEP = ["step", "collect", "learn"]
QUIET = {"validate_before": False, "validate_after": False}


def test_a_step_collects_and_learns_and_nothing_is_published() -> None:
    assert calls(2) == ["validate", *STEP, *STEP, "save", "validate"]


def test_it_validates_and_saves_when_the_config_says_so() -> None:
    found = calls(4, save_every=2, save_last=False, validate_every=1, **QUIET)
    assert found == [*STEP, "validate", *STEP, "validate", "save", *STEP, "validate", *STEP]
    assert calls(1, **QUIET) == [*STEP, "save"]


@pytest.mark.parametrize("kind", ["conversations", "preferences"])
def test_the_config_says_what_its_examples_are(kind: Kind) -> None:
    config = SupervisedConfig(name="supervised", examples=kind)
    assert SupervisedTrainer.examples(config) == kind
