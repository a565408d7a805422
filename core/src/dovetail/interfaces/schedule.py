"""Schedule: the learning rate over the run."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from dovetail.interfaces.plugin import Plugin


class Schedule(Plugin):
    """A learning-rate schedule: a function of the step alone, so that checkpoints need not keep its state.

    The learning rate is lr · (step + 1) / warmup_steps during warm-up, and lr · (r + (1 − r) · share) after it. Here lr is the peak
    learning rate, r is `min_lr_ratio`, and share is the value of the method `share`.
    """

    needs_end: ClassVar[bool] = True
    """Whether the schedule must know the last step of the run."""

    @abstractmethod
    def share(self, step: int, last: int | None) -> float:
        """Return the learning rate as a share between its floor (0) and its peak (1).

        Args:
            step: optimizer steps since the peak, from 0.
            last: the run's last step, also counted from the peak, at least `step`. None, for unknown, is only passed to schedules
                without `needs_end`.
        """
