"""Explained variance: the share of the returns' variance that a value function explains, as a mergeable metric."""

from __future__ import annotations

import math

import attrs
import numpy as np
from jaxtyping import Bool, Real


@attrs.frozen
class RunningVariance:
    """Mean and sum of squared deviations of some numbers, mergeable without cancellation (Chan et al., 1979)."""

    count: float
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Real[np.ndarray, "K"]) -> RunningVariance:
        """Compute the variance of numbers [K], in float64."""
        if not len(values):
            return cls(0.0, 0.0, 0.0)
        exact = values.astype(np.float64)
        mean = float(exact.mean())
        return cls(float(len(exact)), mean, float(np.square(exact - mean).sum()))

    def merge(self, other: RunningVariance) -> RunningVariance:
        """Return the variance of both sets of numbers together."""
        count = self.count + other.count
        if not count:
            return self
        apart, share = other.mean - self.mean, other.count / count
        return RunningVariance(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * self.count * share,
        )


@attrs.frozen
class ExplainedVariance:
    """1 − Var(R − V) / Var(R) of returns R and values V: 1 for perfect V, 0 for constant V; NaN if all R are equal."""

    returns: RunningVariance
    errors: RunningVariance

    @classmethod
    def of(
        cls,
        values_T: Real[np.ndarray, "T"],
        returns_T: Real[np.ndarray, "T"],
        mask_T: Bool[np.ndarray, "T"],
    ) -> ExplainedVariance:
        """Compute the explained variance of values and returns [T] where the mask [T] is 1."""
        kept_K, aims_K = values_T[mask_T].astype(np.float64), returns_T[mask_T].astype(np.float64)
        return cls(RunningVariance.of(aims_K), RunningVariance.of(aims_K - kept_K))

    @property
    def value(self) -> float:
        """The explained variance, at most 1; NaN if all returns are equal."""
        if self.returns.squares <= 0:
            return math.nan
        return 1 - self.errors.squares / self.returns.squares

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """Return the explained variance over the tokens of both."""
        return ExplainedVariance(self.returns.merge(other.returns), self.errors.merge(other.errors))
