"""Sparse: on-policy training with validations at steps 1, 2, 4, 8, …"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces import Trainer
from stagekit.config import SparseConfig

if TYPE_CHECKING:
    from dovetail.interfaces import Run


class Sparse(Trainer):
    """Validates after each step whose number is a power of two, and saves at the end."""

    name = "sparse"
    api = ">=2.0,<3"
    Config = SparseConfig

    def run(self, run: Run) -> None:
        run.publish_weights()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
                run.publish_weights()
            number = run.position.step
            if number & (number - 1) == 0:
                run.validate()
        if self.config.save_last:
            run.save()
