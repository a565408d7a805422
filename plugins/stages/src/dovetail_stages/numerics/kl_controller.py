"""The KL controllers of this package: a factor on the KL weight, fixed or steered towards a target KL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.errors import NumericsError
from dovetail.interfaces import KlController, PluginContext
from dovetail_stages.config import AdaptiveKlConfig

LARGEST_ERROR = 0.2
"""Bound on the relative error kl / target − 1, in either direction, before `AdaptiveKl` uses it."""


class FixedKl(KlController):
    """A constant KL weight: the controller multiplies the configured weight by 1, whatever the KL."""

    name = "fixed"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})

    @property
    def value(self) -> float:
        return 1.0

    def update(self, kl: float, samples: int) -> None:
        """Leave the factor as it is."""


class AdaptiveKl(KlController):
    """Proportional control, in log space, of the factor `value` on the KL weight (Ziegler et al., arXiv 1909.08593).

    value ← value · (1 + clip(kl / target − 1, ±0.2) · samples / horizon)

    A step of more samples than the horizon counts as a step of `horizon` samples.
    """

    name = "adaptive"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = AdaptiveKlConfig

    def __init__(self, config: AdaptiveKlConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._value = 1.0

    @property
    def value(self) -> float:
        return self._value

    def update(self, kl: float, samples: int) -> None:
        """Raise the factor if the KL is above its target, and lower it if below.

        Raises:
            NumericsError: the KL is not finite.
        """
        if not math.isfinite(kl):
            raise NumericsError(
                f"the KL of this step is {kl}, so the weight of the KL penalty can't be adapted to it",
                hint="lower the learning rate, or set the penalty's `controller` to fixed",
            )
        error = min(max(kl / self.config.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        self._value *= 1.0 + error * min(samples / self.config.horizon, 1.0)

    def state(self) -> Mapping[str, Any]:
        return {"value": self._value}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._value = float(state["value"])
