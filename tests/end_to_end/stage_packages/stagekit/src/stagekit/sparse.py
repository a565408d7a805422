"""Sparse: on-policy training with ever rarer validations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces import Trainer
from stagekit.config import SparseConfig

if TYPE_CHECKING:
    from dovetail.interfaces import Run


class Sparse(Trainer):
    """Validates after `validate_every` steps, after twice as many, four times, eight times, …"""

    name = "sparse"
    api = ">=2.0,<3"
    Config = SparseConfig

    def run(self, run: Run) -> None:
        config = self.config
        run.publish_weights()
        if config.validate_before and not run.position.validated:
            run.validate()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
                run.publish_weights()
            times = self._times(run, config.validate_every)
            if times and times & (times - 1) == 0:
                run.validate()
            if self._times(run, config.save_every):
                run.save()
        if config.save_last:
            run.save()
        if config.validate_after:
            run.validate()

    def _times(self, run: Run, every: int) -> int:
        """How often the step that has just ended is so many; 0 where it is between two of them."""
        times, rest = divmod(run.position.step, every) if every else (0, 0)
        return 0 if rest else times
