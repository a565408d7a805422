"""RunDiagnosis: finds, in a run's metrics, conditions that keep it from learning, with their first step and the change to make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dovetail_diagnosis.conditions import CONDITIONS, FOLLOWED, STEPS, Condition
from dovetail_diagnosis.history import MetricHistory

PAGE = "docs/diagnosis.md"


@dataclass
class LearningWarning:
    """A warning that a run may not learn: a condition has held for `Condition.rows` consecutive rows of metrics."""

    name: str
    message: str
    """A description of the condition, with the metrics that show it at the step where the warning began."""
    hint: str
    """Advice on what to try."""
    figure: str
    """The most important metric that shows the condition."""
    key: str
    """The key of the config to change first."""
    first: int
    """First step at which the condition held."""
    last: int | None = None
    """Last step at which the condition held; None while the warning has not ended."""

    @property
    def page(self) -> str:
        """The link to the documentation of the condition."""
        return f"{PAGE}#{self.name}"


class RunDiagnosis:
    """Follows the metrics of a run from its first step and records learning warnings.

    Attributes:
        warnings: the warnings of the whole run, in the order in which they began.
        in_force: the warnings that have not ended, by the name of their condition.
    """

    def __init__(self) -> None:
        self.warnings: list[LearningWarning] = []
        self.in_force: dict[str, LearningWarning] = {}
        self._history = MetricHistory(FOLLOWED)
        self._streaks: Counter[str] = Counter()
        """Number of latest consecutive rows at which a condition held, by name; negative if it did not hold at these rows."""
        self._since: dict[str, int] = {}
        self._until: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, object]) -> list[LearningWarning]:
        """Process the next row of metrics, of a step or of a validation, and return the warnings that begin with it.

        A warning begins after its condition has held for `Condition.rows` consecutive rows, and ends after the condition has been absent
        for as many rows.
        """
        self._history.add(step, metrics)
        known = len(self.warnings)
        for condition in CONDITIONS:
            if self._speaks(condition):
                self._follow(condition, step)
        return self.warnings[known:]

    def _speaks(self, condition: Condition) -> bool:
        """Return whether the latest row of metrics has one of the condition's metrics."""
        figures = {self._history.score if name == "val" else name for name in condition.figures}
        return not figures.isdisjoint(self._history.now)

    def _follow(self, condition: Condition, step: int) -> None:
        name = condition.name
        running, streak = self.in_force, self._streaks[name]
        holds = running.keys().isdisjoint(condition.unless) and condition.holds(self._history)
        streak = max(streak, 0) + 1 if holds else min(streak, 0) - 1
        self._streaks[name] = streak
        if streak == 1:
            self._since[name] = step
        if holds:
            self._until[name] = step
        if streak == condition.rows and name not in running:
            self.warnings.append(self._warning(condition))
            running[name] = self.warnings[-1]
        elif streak == -condition.rows and name in running:
            running.pop(name).last = self._until[name]

    def _warning(self, condition: Condition) -> LearningWarning:
        now, score = self._history.now, self._history.score
        shown = condition.figures if condition.shows is None else condition.shows(self._history)
        figures = [score if name == "val" else name for name in shown]
        quoted = ", ".join(f"{name} {now[name]:.3g}" for name in figures if name in now)
        if condition.evidence is not None:
            quoted = condition.evidence(self._history)
        message = f"{condition.message}: {quoted}"
        if condition.rows == STEPS:
            message = f"for {condition.rows} steps in a row, {message}"
        return LearningWarning(
            name=condition.name,
            message=message,
            hint=condition.hint,
            figure=next((name for name in figures if name in now), figures[0]),
            key=condition.key,
            first=self._since[condition.name],
        )


def diagnose(rows: Iterable[Mapping[str, object]]) -> RunDiagnosis:
    """Return the diagnosis of a run from the rows of its `metrics.jsonl`; rows without a step are ignored."""
    diagnosis = RunDiagnosis()
    for row in rows:
        step = row.get("step")
        if isinstance(step, int | float) and not isinstance(step, bool) and abs(step) < 2**53:
            diagnosis.observe(int(step), row)
    return diagnosis
