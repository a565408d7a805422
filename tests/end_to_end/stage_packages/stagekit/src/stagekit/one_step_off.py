"""OneStepOff: the samples of the next step are generated while a step learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.interfaces import Trainer
from stagekit.config import OneStepOffConfig

if TYPE_CHECKING:
    from dovetail.interfaces import Run


class OneStepOff(Trainer):
    """Every step but the first learns from samples of the weights before the last update."""

    name = "one_step_off"
    api = ">=2.0,<3"
    Config = OneStepOffConfig

    @classmethod
    def max_staleness(cls, config: Any) -> int:
        return 1

    def run(self, run: Run) -> None:
        run.publish_weights()
        if self.config.validate_before and not run.position.validated:
            run.validate()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.admit()
                run.learn(step)
                run.publish_weights()
            if self._due(run, self.config.validate_every):
                run.validate()
            if self._due(run, self.config.save_every):
                run.save()
        if self.config.save_last:
            run.save()
        if self.config.validate_after:
            run.validate()

    def _due(self, run: Run, every: int) -> bool:
        return bool(every) and run.position.step % every == 0
