"""The run that trainers drive keeps the contract of its interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.interfaces import Run, Trainer
from dovetail.sections import TrainerSection
from dovetail_sdk.testing.conformance import RunConformance


class OffPolicy(Trainer):
    """Says that it collects with weights from one step ago."""

    name = "off_policy"
    api = ">=2.0,<3"
    Config = TrainerSection

    @classmethod
    def max_staleness(cls, config: Any) -> int:
        return 1

    def run(self, run: Run) -> None: ...


class TestTrainingRun(RunConformance):
    """Over the real parts of a run, with scripted workers."""

    @pytest.fixture(autouse=True)
    def parts(self, compose: Callable[..., Any], worker_group: Callable[..., Any]) -> None:
        self.compose, self.worker_group = compose, worker_group

    def make_run(
        self, steps: int, *, learn_error: Exception | None = None, max_staleness: int = 0
    ) -> Run:
        script = [] if learn_error is None else [learn_error]
        more = {"trainer": OffPolicy} if max_staleness else {}
        actor = self.worker_group(script=script)
        composed = self.compose(f"trainer.total_steps={steps}", actor=actor, **more)
        return composed.run
