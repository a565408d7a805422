"""Metrics that merge: over micro-batches, ranks and mini-batches, without a mean of means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, Self, runtime_checkable

import attrs


@runtime_checkable
class Metric(Protocol):
    """A value that can be merged with values of the same class."""

    @property
    def value(self) -> float:
        """The metric's value."""
        ...

    def merge(self, other: Self) -> Self:
        """Merge two metrics; associative and commutative up to rounding."""
        ...


@attrs.frozen
class Mean:
    """A weighted mean, kept as total and weight; NaN where the weight is 0."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@attrs.frozen
class Sum:
    """The sum of the merged values, such as a count of events."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@attrs.frozen
class Max:
    """The largest of the merged values."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@attrs.frozen
class Min:
    """The smallest of the merged values."""

    value: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@attrs.frozen
class Last:
    """The latest value, such as a learning rate or a norm. Merging keeps the other value, so ranks must have equal values."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


@attrs.frozen
class Std:
    """An unbiased standard deviation, kept as count, mean and sum of squared deviations from the mean.

    0 for a single value, NaN for no value.
    """

    count: float
    mean: float
    squares: float

    @property
    def value(self) -> float:
        if not self.count:
            return math.nan
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def merge(self, other: Std) -> Std:
        # Chan, Golub and LeVeque's update: sum(x²) − n·mean² would cancel if the mean is large.
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        return Std(
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart * apart * self.count * other.count / count,
        )


@attrs.frozen
class EffectiveShare:
    """Effective sample size of n weights w, as a share of n: (Σ w)² / (n Σ w²).

    1 if all weights are equal, 1/n if only one is not 0, NaN if all are 0.
    """

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        return self.total * self.total / (self.count * self.squares) if self.squares else math.nan

    def merge(self, other: EffectiveShare) -> EffectiveShare:
        return EffectiveShare(
            self.total + other.total, self.squares + other.squares, self.count + other.count
        )


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge mappings of metrics; metrics of the same name become one."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def is_empty(metric: Metric) -> bool:
    """Return whether a metric has seen no value; a metric of an unknown class counts as empty if its value is NaN."""
    match metric:
        case Mean():
            return not metric.weight
        case Std():
            return not metric.count
        case EffectiveShare():
            return not metric.squares
        case Max() | Min():
            return metric in (Max(-math.inf), Min(math.inf))
        case Sum() | Last():
            return False
        case _:
            return math.isnan(metric.value)


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return each metric's value, by name; empty metrics are left out."""
    return {name: metric.value for name, metric in metrics.items() if not is_empty(metric)}
