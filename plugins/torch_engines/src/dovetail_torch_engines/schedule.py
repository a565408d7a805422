"""The learning rate as a function of the step alone, so that a resumed run needs no state."""

from __future__ import annotations

from typing import cast

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext, Schedule
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import OptimSection


class LearningRate:
    """The learning rate at a step: warm-up, then the schedule of an `optim` section."""

    def __init__(self, section: OptimSection, total_steps: int | None) -> None:
        """Construct the schedule that the section names.

        Args:
            section: the role's `optim` section.
            total_steps: the number of the run's optimizer steps; None if unknown.

        Raises:
            ConfigError: the schedule needs the number of steps, but `total_steps` is None.
            PluginError: the schedule can't be found or loaded.
        """
        ref = ref_for("schedule", section.schedule)
        self._schedule = cast("Schedule", make_plugin(ref, PluginContext()))
        if total_steps is None and self._schedule.needs_end:
            raise ConfigError(
                f"optim.schedule={ref.name} needs the run's number of steps, which is not set",
                hint="use optim.schedule=constant, or set trainer.total_steps",
            )
        self._section, self._total_steps = section, total_steps

    def __call__(self, step: int, peak: float | None = None) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0.

        Args:
            step: the step of the optimizer.
            peak: the peak learning rate of a parameter group; None for `optim.lr`.
        """
        section = self._section
        peak = section.lr if peak is None else peak
        if step < section.warmup_steps:
            # From step + 1: a first step with a rate of 0 would change nothing.
            return peak * (step + 1) / section.warmup_steps
        # The peak is reached in the last step of warm-up, or in the first step without warm-up.
        start = max(section.warmup_steps - 1, 0)
        # At least 1, even if the run ends with its warm-up: schedules divide by it.
        last = None if self._total_steps is None else max(self._total_steps - 1 - start, 1)
        since = step - start if last is None else min(step - start, last)
        share = self._schedule.share(since, last)
        if share == 1:
            return peak
        return peak * (section.min_lr_ratio + (1 - section.min_lr_ratio) * share)
