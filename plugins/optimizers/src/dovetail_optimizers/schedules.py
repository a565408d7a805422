"""Learning-rate schedules, each a function of the number of steps since the peak."""

from __future__ import annotations

import math

from dovetail.interfaces import Schedule
from dovetail_optimizers.config import WsdConfig


class Constant(Schedule):
    """Constant learning rate: `share` is 1, the peak, at every step."""

    name = "constant"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    needs_end = False

    def share(self, step: int, last: int | None) -> float:
        return 1.0


class Linear(Schedule):
    """A straight line from the peak to `min_lr_ratio` times the peak at the last step.

    `share`, which is 1 at the peak and 0 at the last step, is 1 − step / last.
    """

    name = "linear"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def share(self, step: int, last: int | None) -> float:
        return 1 - _done(step, last)


class Cosine(Schedule):
    """Half a cosine from the peak to `min_lr_ratio` times the peak at the last step (arXiv 1608.03983, without restarts).

    `share`, which is 1 at the peak and 0 at the last step, is (1 + cos(π · step / last)) / 2.
    """

    name = "cosine"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def share(self, step: int, last: int | None) -> float:
        return (1 + math.cos(math.pi * _done(step, last))) / 2


class WarmupStableDecay(Schedule):
    """The peak rate after the warm-up, then a decay to `min_lr_ratio` times the peak over the last `decay_share` of the steps.

    x = (step / last − (1 − decay_share)) / decay_share rises from 0 to 1 during the decay. `share` is 1 (the peak) before the decay, and
    then falls to 0 (`min_lr_ratio` times the peak). The option `decay` gives the formula in x.
    """

    name = "wsd"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = WsdConfig

    def share(self, step: int, last: int | None) -> float:
        share: float = self.config.decay_share
        x = max(0.0, (_done(step, last) - (1 - share)) / share)
        if self.config.decay == "sqrt":
            return 1 - math.sqrt(x)
        if self.config.decay == "cosine":
            return (1 + math.cos(math.pi * x)) / 2
        return 1 - x


def _done(step: int, last: int | None) -> float:
    """Return the progress from the peak (0) to the last step (1).

    Args:
        step: the number of steps since the peak.
        last: the number of steps from the peak to the last step; must not be None.
    """
    assert last is not None, "the schedule says that it needs the last step"
    return step / last
