"""Learning-rate schedules, each a function of the number of steps since the peak."""

from __future__ import annotations

import math

from dovetail.interfaces import Schedule
from dovetail_optimizers.config import WsdConfig


class Constant(Schedule):
    """Constant learning rate: share = 1, the peak, at every step (share = 0 would be `min_lr_ratio` times the peak)."""

    name = "constant"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    needs_end = False

    def share(self, step: int, last: int | None) -> float:
        return 1.0


class Linear(Schedule):
    """A straight line from the peak (share 1) to `min_lr_ratio` (share 0) at the last step: share = 1 − step / last."""

    name = "linear"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def share(self, step: int, last: int | None) -> float:
        return 1 - _done(step, last)


class Cosine(Schedule):
    """Half a cosine from the peak to `min_lr_ratio` at the last step: share = (1 + cos(π · step / last)) / 2 (arXiv 1608.03983, without
    restarts).
    """

    name = "cosine"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    def share(self, step: int, last: int | None) -> float:
        return (1 + math.cos(math.pi * _done(step, last))) / 2


class WarmupStableDecay(Schedule):
    """The peak rate after the warm-up, then a decay to `min_lr_ratio` over the last `decay_share` of the steps.

    With x = (step / last − (1 − decay_share)) / decay_share, share is 1 while x is below 0; over x from 0 to 1 it falls to 0 by `decay`.
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
    """Return the run's progress from the peak (0) to the last step (1)."""
    assert last is not None, "the schedule says that it needs the last step"
    return step / last
