"""The history of a run's metrics that the functions of a `Condition` read."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

WINDOW = 5
"""Number of consecutive values in a mean, since a single batch shows no trend."""
_SCORES = (re.compile(r"val/acc@\d+"), re.compile(r"val/mean@\d+"))
"""Patterns of the main score's name in a run with rewards, the preferred first: accuracy, or mean score, over all data sources."""


@dataclass
class MetricCourse:
    """The history of one metric: finite values at ascending steps, and the highest and lowest mean of `WINDOW` consecutive values."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    high: float = -math.inf
    high_step: int = 0
    low: float = math.inf
    low_step: int = 0

    def add(self, step: int, value: float) -> None:
        """Append a value at a step."""
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) >= WINDOW:
            if self.recent > self.high:
                self.high, self.high_step = self.recent, step
            if self.recent < self.low:
                self.low, self.low_step = self.recent, step

    @property
    def recent(self) -> float:
        """The mean of the last `WINDOW` values; NaN if there are fewer values."""
        return _mean(self.values[-WINDOW:])

    @property
    def first(self) -> float:
        """The mean of the first `WINDOW` values; NaN if there are fewer values."""
        return _mean(self.values[:WINDOW])

    def up_to(self, step: int) -> list[float]:
        """Return the values up to and including a step."""
        return self.values[: bisect_right(self.steps, step)]

    def after(self, step: int) -> list[float]:
        """Return the values after a step."""
        return self.values[bisect_right(self.steps, step) :]


@dataclass(frozen=True)
class ScoredValidation:
    """The run's main score in one validation, with the ends of its confidence interval. Without an interval, both ends equal the score."""

    step: int
    value: float
    low: float
    high: float


@dataclass
class MetricHistory:
    """The logged metrics of a run.

    Attributes:
        now: the finite metrics of the latest row.
        start: the first value of each metric.
        series: the history of each metric whose earlier values a `Condition` uses.
        validations: the main score in each validation so far.
        best: the validation with the highest score; the first of equal validations.
        score: the name of the main score; empty before the first validation.
    """

    followed: frozenset[str]
    """Metrics whose history is kept."""
    now: dict[str, float] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    series: dict[str, MetricCourse] = field(default_factory=dict)
    validations: list[ScoredValidation] = field(default_factory=list)
    best: ScoredValidation | None = None
    score: str = ""

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add the metrics of one row of `metrics.jsonl`."""
        self.now = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and -1e308 < value < 1e308
        }
        self.start = {**self.now, **self.start}
        for name in self.followed & self.now.keys():
            self.series.setdefault(name, MetricCourse()).add(step, self.now[name])
        if not self.score:
            named = (name for form in _SCORES for name in self.now if form.fullmatch(name))
            self.score = next(named, "")
        if self.score in self.now:
            value = self.now[self.score]
            ends = [self.now.get(f"{self.score}/{end}", value) for end in ("low", "high")]
            self.validations.append(ScoredValidation(step, value, *ends))
            if self.best is None or value > self.best.value:
                self.best = self.validations[-1]

    def of(self, name: str) -> MetricCourse:
        """Return the history of a metric; empty for a metric that was never logged or whose history is not kept."""
        return self.series.get(name, MetricCourse())

    def rise(self, name: str, step: int) -> float:
        """Return the highest value after a step, divided by the median up to the step; 0 without later values, or if the median is not above 0.

        Without earlier values, the first later value takes the median's place.
        """
        before, after = self.of(name).up_to(step), self.of(name).after(step)
        if not after:
            return 0.0
        usual = median(before or after[:1])
        return max(after) / usual if usual > 0 else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if len(values) == WINDOW else math.nan
