"""What `dovetail reward try` shows: scores by source, components, errors by kind, times, and the rows themselves."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dovetail.interfaces import Score
from dovetail.scoring import TrialSample
from dovetail_rewards.trial_figures import (
    TrialSpread,
    alike_failures,
    by_source,
    components,
    extra,
    scores,
    what_failed,
)

ROWS = 10
"""Rows that a person is shown."""
MESSAGES = 3
"""Messages that a person is shown of each kind of error."""
_WIDTH = 48
_WIDER = 120
"""Characters of what failed: the cause stands at the end of a message."""
_GROUND_TRUTH = "ground_truth"
"""Where a response comes from that is a ground truth."""
_BETWEEN = ", "
"""Between file and row in where a row comes from."""
_SPREAD_HEADERS = ("samples", "mean", "std", "min", "max")


def show(samples: Sequence[TrialSample], console: Console) -> None:
    """Print the tables."""
    taken = Counter(sample.row.taken_from for sample in samples)
    console.print(
        f"{len(samples)} responses from "
        + escape(", ".join(f"{name} ({count})" for name, count in taken.items()))
    )
    form = _Form.of(samples)
    if form.prefix:
        console.print(escape(f"rows of {form.prefix}"))
    console.print()
    title = "rows" if len(samples) <= ROWS else "first rows"
    console.print(_rows_table(title, samples[:ROWS], form))
    spread_of_scores = _table("scores", "data_source", "function", *_SPREAD_HEADERS, "failed")
    for (source, function), group in by_source(samples).items():
        figures = scores(group)
        cells = [source or "none", function or "the manager's own", *_spread(figures)]
        spread_of_scores.add_row(*map(escape, cells), str(len(group) - len(figures)))
    console.print()
    console.print(spread_of_scores)
    if set(taken) == {_GROUND_TRUTH} and max(scores(samples), default=0) <= 0:
        console.print(
            "→ the rows have no responses, so their ground truths were scored in their place: a reward that looks for a "
            "form around the answer (#### …, \\boxed{…}) finds none in them; --responses FILE scores real ones",
            markup=False,
            soft_wrap=True,
        )
    if parts := components(samples):
        table = _table("components", "name", *_SPREAD_HEADERS)
        for name, figures in parts.items():
            table.add_row(escape(name), *_spread(figures))
        console.print()
        console.print(table)
    if errors := _errors(samples, form):
        console.print()
        console.print(errors)
    _show_times(samples, console, form)


@attrs.frozen(kw_only=True)
class _Form:
    """What is shown of every row."""

    prefix: str
    """The file that is not repeated in each row; empty where there are several."""
    has_preds: bool
    """Whether any function gave the answer that it found."""
    has_failures: bool
    """Whether any sample tells what failed."""
    time: str
    """What the times are, as a heading."""

    @classmethod
    def of(cls, samples: Sequence[TrialSample]) -> _Form:
        places = {sample.row.prompt.where.rpartition(_BETWEEN)[0] for sample in samples}
        waited = any(sample.waited for sample in samples)
        return cls(
            prefix=places.pop() if len(places) == 1 else "",
            has_preds=any(extra(sample, "pred")[0] for sample in samples),
            has_failures=any(what_failed(sample) is not None for sample in samples),
            time="time, waiting included" if waited else "time",
        )

    def place(self, sample: TrialSample) -> str:
        """Where the row is, without the file that all are of."""
        return sample.row.prompt.where.removeprefix(self.prefix).lstrip(_BETWEEN)


def _rows_table(title: str, samples: Sequence[TrialSample], form: _Form) -> Table:
    """A line for each sample."""
    headers = ["row", "score", form.time]
    headers += ["what failed"] if form.has_failures else []
    headers += ["answer found"] if form.has_preds else []
    table = _table(title, *headers, "ground truth", "end of response")
    for sample in samples:
        outcome = sample.outcome
        scored = isinstance(outcome, Score)
        score = f"{outcome.value:g}" if isinstance(outcome, Score) else str(outcome.kind)
        cells = [_short(what_failed(sample), _WIDER)] if form.has_failures else []
        cells += [_short(extra(sample, "pred")[1])] if form.has_preds else []
        cells += [_short(sample.row.prompt.ground_truth), _short(sample.response, end=True)]
        table.add_row(
            escape(form.place(sample)),
            score if scored else f"[red]{score}[/red]",
            _ms(sample.seconds),
            *map(escape, cells),
        )
    return table


def _errors(samples: Sequence[TrialSample], form: _Form) -> Table | None:
    """The most frequent messages of each kind of error, each with the first row that it befell; None where nothing failed."""
    kinds = alike_failures(samples)
    table = _table("errors", "kind", "samples", "first")
    for kind, groups in kinds.items():
        for alike in groups[:MESSAGES]:
            sample, failure = alike[0]
            table.add_row(kind, str(len(alike)), escape(f"{form.place(sample)}: {failure.message}"))
        if rest := groups[MESSAGES:]:
            count = sum(map(len, rest))
            table.add_row(kind, str(count), f"other messages ({len(rest)}); --json has them all")
    return table if kinds else None


def _show_times(samples: Sequence[TrialSample], console: Console, form: _Form) -> None:
    if not samples:
        return
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    times = [sample.seconds for sample in ordered]
    late = times[min(len(times) - 1, int(0.95 * len(times)))]
    console.print()
    what = form.time.replace("time", "time a sample")
    console.print(
        f"{what}: median {_ms(statistics.median(times))}, 95% within {_ms(late)}, "
        f"longest {_ms(times[-1])} ({escape(form.place(ordered[-1]))})"
    )
    if any(sample.waited for sample in samples):
        console.print(
            "→ the manager queues samples, and a time counts from when it was given the sample: it tells how long scores "
            "take to come, not how long a function runs; reward.timeout counts running time alone",
            markup=False,
            soft_wrap=True,
        )


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _spread(figures: Sequence[float]) -> list[str]:
    spread = TrialSpread.of(figures)
    shown = (spread.mean, spread.std, spread.low, spread.high)
    return [str(spread.count), *("–" if figure is None else f"{figure:.4g}" for figure in shown)]


def _short(value: object, width: int = _WIDTH, *, end: bool = False) -> str:
    text = " ".join(str("–" if value is None else value).split())
    if len(text) <= width:
        return text
    return f"…{text[1 - width :]}" if end else f"{text[: width - 1]}…"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
