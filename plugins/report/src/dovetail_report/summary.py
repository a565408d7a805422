"""The results of a run from its files: its metrics by step, and the figures of `summary.json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dovetail.errors import RunDirectoryError
from dovetail.telemetry import RunDirectory, read_rows
from dovetail_diagnosis import figures

EDGE = 10
"""Maximum number of steps over which the first and the last reward are averaged."""


class History:
    """Metrics of a run by step. Lines of one step are merged; if two lines have the same metric, the later line counts.

    Attributes:
        steps: steps with metrics, ascending; validation before training is step 0.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        merged: dict[int, dict[str, float | None]] = {}
        for row in rows:
            step = row.get("step")
            if not isinstance(step, int | float):
                continue
            figures_of_step = merged.setdefault(int(step), {})
            for name, value in row.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if name != "step" and (value is None or is_number):
                    figures_of_step[name] = value
        self.steps = sorted(merged)
        self._by_step = {step: merged[step] for step in self.steps}
        # Stored once each, since few of many steps differ in their metrics' names.
        self._kinds = [*dict.fromkeys(map(tuple, self._by_step.values()))]

    @classmethod
    def read(cls, run_directory: Path) -> History:
        """Read the history from a run's `metrics.jsonl`."""
        return cls(read_rows(run_directory / "metrics.jsonl"))

    def at(self, step: int) -> dict[str, float | None]:
        """Return the metrics of a step, with None for values that were not finite."""
        return self._by_step.get(step, {})

    @cached_property
    def names(self) -> list[str]:
        """Every metric, in order of first appearance."""
        return [*dict.fromkeys(chain.from_iterable(self._kinds))]

    def series(self, name: str | None) -> tuple[list[int], list[float]]:
        """Return steps and finite values of a metric; both are empty for a metric that was never logged."""
        points = [(step, self._by_step[step].get(name or "")) for step in self.steps]
        known = [
            (step, value) for step, value in points if value is not None and math.isfinite(value)
        ]
        return [step for step, _ in known], [value for _, value in known]

    def find(self, figure: figures.Figure) -> str | None:
        """Return the name of the metric under which this run logged a key figure.

        None if the run never logged the figure, or if every step with it also has a more informative figure (`Figure.unless`).
        """
        if not figure.unless:
            return figure.find(self.names)
        found = map(figure.find, self._kinds)
        return next((name for name in found if name is not None), None)

    def values(self, figure: figures.Figure) -> list[float]:
        """Return the finite values of a key figure, in order of steps."""
        return self.series(self.find(figure))[1]

    @cached_property
    def not_finite(self) -> dict[str, list[int]]:
        """The metrics that were NaN or infinite, with the steps."""
        found: dict[str, list[int]] = {}
        for step in self.steps:
            for name, value in self._by_step[step].items():
                if value is None or not math.isfinite(value):
                    found.setdefault(name, []).append(step)
        return found


def summarise(run_directory: Path, history: History | None = None) -> dict[str, Any]:
    """Return summary values of a run from its files; unknown values are left out.

    Args:
        run_directory: the run directory.
        history: the history of the run's metrics, if it has been read already.

    Returns:
        `steps`; `accuracy_before`, `accuracy_after` and `accuracy_best` in validation; `accuracy_metric`, the metric with these
        values, named by `summary.json` or else taken from the first validation (a mean score if the reward did not say which
        responses are right); `reward_first` and `reward_last`, means over the first and the last `reward_steps` steps (at most 10);
        `seconds_per_step` and `tokens_per_second` (medians); `step_seconds` (the sum over steps); `reward_failures`.
    """
    history = history or History.read(run_directory)
    found: dict[str, Any] = {"steps": max(history.steps, default=0)}
    metric = accuracy_metric(run_directory, history)
    if accuracy := history.series(metric)[1]:
        found["accuracy_metric"] = metric
        found["accuracy_before"] = accuracy[0]
        if len(accuracy) > 1:
            found["accuracy_after"] = accuracy[-1]
        found["accuracy_best"] = max(accuracy)
    if rewards := history.values(figures.REWARD):
        edge = max(1, min(EDGE, len(rewards) // 2))
        found["reward_first"] = fmean(rewards[:edge])
        found["reward_last"] = fmean(rewards[-edge:])
        found["reward_steps"] = edge
    if seconds := history.values(figures.SECONDS):
        found["seconds_per_step"] = median(seconds)
        found["step_seconds"] = sum(seconds)
    if speeds := history.values(figures.SPEED):
        found["tokens_per_second"] = median(speeds)
    if failures := history.values(figures.FAILURES):
        found["reward_failures"] = int(sum(failures))
    return found


def accuracy_metric(run_directory: Path, history: History) -> str | None:
    """Return the validation metric by which a run is judged: the metric in `summary.json`, if it was logged, or else a metric of the
    first validation; None without validation.
    """
    try:
        named = RunDirectory(run_directory).read_json("summary.json")
    except RunDirectoryError:
        named = None  # a killed run has no summary, or an incomplete one
    metric = named.get("accuracy_metric") if isinstance(named, dict) else None
    if metric in history.names:
        return str(metric)
    figures_of_step = (history.at(step) for step in history.steps)
    found = (figures.ACCURACY.find(row) or figures.SCORE.find(row) for row in figures_of_step)
    return next((name for name in found if name is not None), None)


def count_events(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    """Return warnings and errors of `events.jsonl` as (level, event, count), the most frequent first.

    An event with a `detail` is counted as `event: detail`.
    """
    counts = Counter(
        (str(row["level"]), ": ".join(str(row[key]) for key in ("event", "detail") if row.get(key)))
        for row in rows
        if row.get("level") in ("warning", "error", "critical")
    )
    return [(level, event, count) for (level, event), count in counts.most_common()]
