"""The console tracker: a live display on a terminal, one plain line a step elsewhere, a summary at the end."""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dovetail.interfaces import PluginContext, Tracker
from dovetail.telemetry import RunDirectory, Terminal, numbers, visible
from dovetail_console.config import ConsoleConfig
from dovetail_console.next_commands import next_commands, next_stage
from dovetail_diagnosis import figures

_LABELS = {
    "accuracy_before": ("{} before", ""),
    "accuracy_after": ("{} after", ""),
    "accuracy_best": ("{}, best", ""),
    "reward_first": ("Reward, first steps", "number"),
    "reward_last": ("Reward, last steps", "number"),
    "train_seconds": ("Training time", "seconds"),
    "seconds_per_step": ("Seconds a step", "seconds"),
    "step_seconds": ("All steps together", "seconds"),
    "tokens_per_second": ("Tokens a second", "length"),
    "reward_failures": ("Failed rewards", "length"),
}
"""Labels and number formats of the entries of a summary. {} stands for the validation metric, and an empty format for this metric's.
The label of any other entry is its name, with spaces for underscores."""
_ELSEWHERE = {
    "error",
    "directory",
    "model",
    "total_steps",
    "accuracy_metric",
}
"""Entries of a summary that have no row of their own in its table."""
_RECENT = 20
"""Number of recent steps from which the remaining time is estimated."""


class ConsoleTracker(Tracker):
    """Tracker that shows a run on the terminal: a live display, or one line per step."""

    name = "console"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = ConsoleConfig

    def __init__(
        self, config: ConsoleConfig, context: PluginContext, console: Console | None = None
    ) -> None:
        super().__init__(config, context)
        self._console = console or Terminal(highlight=False)
        self._live: Live | None = None
        self._figures = (
            *figures.KEY_FIGURES,
            *(figures.Figure(name, name, name) for name in config.metrics),
        )
        self._directory = context.run_directory
        self._plan: Any = None
        self._total = 0
        self._step = 0
        self._phase = ""
        self.clock: Callable[[], float] = monotonic
        self._began = self.clock()
        self._ends: list[tuple[int, float]] = []
        self._series: dict[str, list[float]] = {}
        self._latest: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._explained = False
        """Whether a line has explained the sign ±."""

    clock: Callable[[], float]
    """Function that returns the time in seconds: the present, or in `dovetail watch` the time at which the shown row was written."""

    # ── the run's life ──

    def run_started(
        self, config: Any, plan: Any, directory: Path, start_step: int, total_steps: int
    ) -> None:
        # `dovetail watch`, which passes no config, knows only the plan's key figures.
        self._plan, self._directory = plan if config is not None else None, directory
        self._step, self._total = start_step, total_steps
        if plan is not None:
            first = [figures.key_figure(name, better) for name, better in plan.key_figures.items()]
            rest = [f for f in self._figures if f.metric not in plan.key_figures]
            self._figures = (*first, *rest)
        self._began = self.clock()
        self._ends = [(self._step, self._began)]
        wanted = self._console.is_terminal if self.config.live is None else self.config.live
        if wanted and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=self.config.refresh_per_second,
            )
            # The cursor is restored even if a run dies without closing its trackers.
            atexit.register(self._stop)
            self._live.start()

    def phase_started(self, step: int, phase: str) -> None:
        self._phase = phase

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        advanced = step > self._step
        if advanced:
            self._step = step
            self._ends = [*self._ends, (step, self.clock())][-_RECENT - 1 :]
        for figure in self._figures:
            value = figure.value(metrics)
            if value is not None:
                self._series.setdefault(figure.label, []).append(value)
                self._latest[figure.label] = figure.read(metrics)
                self._labels[figure.label] = figure.label_for(figure.find(metrics))
        shown = any(figure.find(metrics) is not None for figure in self._figures)
        if self._live is None and (advanced or shown):
            self._console.print(self._line(step, metrics, advanced), soft_wrap=True, markup=False)

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        self._phase = ""
        self._stop()
        self._print_summary(summary)

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        """Stop the live display, which leaves its last state on the terminal."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self._stop)

    # ── what is shown ──

    def _seconds_left(self) -> float | None:
        """Return the remaining seconds of the run at the pace of recent steps; None before the first step."""
        (first, since), (last, until) = self._ends[0], self._ends[-1]
        if last == first or not self._total:
            return None
        return (until - since) / (last - first) * max(0, self._total - last)

    def _line(self, step: int, metrics: Mapping[str, float], advanced: bool) -> str:
        """Return a step's metrics as a line of text; with the remaining time if they are the first of a new step (`advanced`)."""
        parts = [f"step {step}/{self._total}" if self._total else f"step {step}"]
        for figure in self._figures:
            name = figure.find(metrics)
            if name is not None:
                parts.append(f"{figure.short_for(name)} {figure.read(metrics)}")
        left = self._seconds_left()
        if left and advanced:
            parts.append(f"left {numbers.write_seconds(left)}")
        if not self._explained and any("±" in part for part in parts):
            self._explained = True
            parts.append(f"({figures.PLUS_MINUS})")
        return "  ".join(parts)

    def _render(self) -> Group:
        """Return the live display: the run's progress, and the key figures with their curves."""
        explained = any("±" in text for text in self._latest.values())
        note = [Text(figures.PLUS_MINUS, style="dim")] if explained else []
        return Group(self._progress(), self._table(), *note)

    def _progress(self) -> Table:
        title = "/".join(self._directory.parts[-2:]) if self._directory else "run"
        total = max(self._total, 1)
        left = self._seconds_left()
        times = f"{numbers.write_seconds(self.clock() - self._began)} gone"
        if left is not None and self._live is not None:
            times += f", {numbers.write_seconds(left)} left"
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, None, None, 1):
            grid.add_column(no_wrap=True, ratio=ratio)
        grid.add_row(
            Text(title, style="bold"),
            Text(f"step {self._step}/{self._total}" if self._total else f"step {self._step}"),
            ProgressBar(total=total, completed=min(self._step, total), width=24),
            Text(f"{self._phase}  {times}" if self._phase else times, style="dim"),
        )
        return grid

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=20)
        table.add_column(justify="right", min_width=9)
        table.add_column(justify="right", min_width=9, style="dim")
        table.add_column(style="cyan", no_wrap=True)
        for figure in self._figures:
            values = self._series.get(figure.label)
            if values:
                table.add_row(
                    self._labels[figure.label],
                    self._latest[figure.label],
                    _change(figure, values),
                    figures.sparkline(values),
                )
        return table

    def _print_summary(self, summary: Mapping[str, Any]) -> None:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column(justify="right")
        steps, total = summary.get("steps"), summary.get("total_steps")
        shown_summary = (
            {**summary, "steps": f"{steps} of {total}"} if total and steps <= total else summary
        )
        metric = summary.get("accuracy_metric")
        figure = figures.validation_figure(metric)
        word = figure.short_for(metric)
        word = word.capitalize() if word == figure.short else word
        for name, value in shown_summary.items():
            if name in _ELSEWHERE or not isinstance(value, str | int | float):
                continue
            label, style = _LABELS.get(name, (name.replace("_", " ").capitalize(), "length"))
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            whole = isinstance(value, int) and style == "length"
            shown = (
                str(value)
                if whole or not is_number
                else numbers.write_figure(float(value), style or figure.style)
            )
            table.add_row(
                label.format(word),
                Text(visible(shown), style="bold" if name == "accuracy_after" else ""),
            )
        for metric, ends in (summary.get("key_figures") or {}).items():
            key = figures.key_figure(metric, ends["better"])
            written = " → ".join(key.write(ends[end]) for end in ("before", "after"))
            table.add_row(visible(key.title), visible(written))
        self._console.print()
        self._console.print(table)
        self._console.print()
        self._print_places(summary)

    def _print_places(self, summary: Mapping[str, Any]) -> None:
        """Print the paths of the run's files and the next commands, without line breaks, so that they can be copied."""
        if directory := summary.get("directory") or self._directory:
            self._print_line(f"{'Run directory':<15}{directory}")
            if (report := Path(directory) / "report.html").exists():
                self._print_line(f"{'Report':<15}{report}")
        if model := summary.get("model"):
            self._print_line(f"{'Model':<15}{model}")
        if best := figures.write_best(summary.get("best")):
            self._print_line(f"{'Best':<15}{best}  {summary['best'].get('path', '')}")
        if self._plan is None or self._directory is None:
            return
        if stage := next_stage(self._plan, summary):
            self._print_line(f"{'Next stage':<15}{stage}")
        self._console.print()
        self._print_line("Next:")
        for command in next_commands(self._plan, RunDirectory(self._directory), summary):
            self._print_line(f"  {command}")

    def _print_line(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


def _change(figure: figures.Figure, values: Sequence[float]) -> str:
    """Return a metric's change since its first value as text."""
    change = values[-1] - values[0]
    if change == 0 or figure.style == "seconds" or not math.isfinite(change):
        return ""
    if (
        figure.style == "percent"
        and 0 <= min(values[0], values[-1]) <= max(values[0], values[-1]) <= 1
    ):
        return f"{100 * change:+.1f} pt"
    return f"{change:+.3g}"
