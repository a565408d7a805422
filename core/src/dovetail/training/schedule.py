"""The learning rate as a function of the step alone: what a resumed run needs no state for."""

from __future__ import annotations

import math

from dovetail.errors import ConfigError
from dovetail.sections import OptimSection


def learning_rate(section: OptimSection, step: int, total_steps: int | None) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Warm-up rises linearly to the peak; `linear` and `cosine` then fall to `min_lr_ratio` at the last step.

    Raises:
        ConfigError: the schedule falls, and the number of steps is unknown.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    if total_steps is None:
        raise ConfigError(
            f"optim.schedule {section.schedule!r} needs to know how many steps the run will take",
            hint="use optim.schedule=constant, or set trainer.total_steps",
        )
    # The peak is reached in the last step of warm-up, or in the first step where there is none.
    peak = max(section.warmup_steps - 1, 0)
    done = min(max(step - peak, 0) / max(total_steps - 1 - peak, 1), 1.0)
    left = 1 - done if section.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * left)
