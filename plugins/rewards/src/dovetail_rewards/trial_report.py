"""What `dovetail reward try` shows: scores by source, components, errors by kind, times, and the rows themselves."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dovetail.interfaces.reward import Failure, Score
from dovetail.interfaces.reward_trial import TrialSample

Item = TypeVar("Item")

SCHEMA = 1
ROWS = 10
"""Rows and slowest samples that a person is shown."""
_WIDTH = 48
_GROUND_TRUTH = "ground_truth"
"""Where a response comes from that is a ground truth."""
_BETWEEN = ", "
"""Between file and row in where a row comes from."""


@attrs.frozen(kw_only=True)
class Spread:
    """Count, mean, spread and extremes of some figures; None where there are no figures."""

    count: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """The spread of these figures; `std` is that of a population."""
        if not figures:
            return cls(count=0, mean=None, std=None, low=None, high=None)
        return cls(
            count=len(figures),
            mean=statistics.fmean(figures),
            std=statistics.pstdev(figures),
            low=min(figures),
            high=max(figures),
        )


def as_json(samples: Sequence[TrialSample]) -> dict[str, Any]:
    """The whole trial as JSON values."""
    return {
        "schema": SCHEMA,
        "sources": [
            {
                "data_source": source,
                "function": function,
                "samples": len(group),
                "scores": attrs.asdict(Spread.of(_scores(group))),
            }
            for (source, function), group in _by_source(samples).items()
        ],
        "components": {
            name: attrs.asdict(Spread.of(figures)) for name, figures in _components(samples).items()
        },
        "failures": dict(Counter(str(failure.kind) for _, failure in _failures(samples))),
        "seconds": attrs.asdict(Spread.of([sample.seconds for sample in samples])),
        "samples": [_row(sample) for sample in samples],
    }


def show(samples: Sequence[TrialSample], console: Console) -> None:
    """Print the tables."""
    taken = Counter(sample.row.taken_from for sample in samples)
    console.print(
        f"{len(samples)} responses from "
        + escape(", ".join(f"{name} ({count})" for name, count in taken.items()))
    )
    prefix = _common_place(samples)
    if prefix:
        console.print(escape(f"rows of {prefix}"))
    console.print()
    console.print(_rows_table("first rows", samples[:ROWS], prefix))
    spread_of_scores = _table("scores", "data_source", "function", *_SPREAD_HEADERS, "failed")
    for (source, function), group in _by_source(samples).items():
        scores = _scores(group)
        cells = [source or "none", function or "the manager's own", *_spread(scores)]
        spread_of_scores.add_row(*map(escape, cells), str(len(group) - len(scores)))
    console.print()
    console.print(spread_of_scores)
    if set(taken) == {_GROUND_TRUTH} and not any(_scores(samples)):
        console.print(
            "→ the rows have no responses, so their ground truths were scored in their place: a reward that looks for a "
            "form around the answer (#### …, \\boxed{…}) finds none in them; --responses FILE scores real ones",
            markup=False,
            soft_wrap=True,
        )
    if components := _components(samples):
        table = _table("components", "name", *_SPREAD_HEADERS)
        for name, figures in components.items():
            table.add_row(escape(name), *_spread(figures))
        console.print()
        console.print(table)
    if failures := _failures(samples):
        table = _table("errors", "kind", "samples", "first")
        for kind, same in _grouped(failures, lambda pair: str(pair[1].kind)).items():
            sample, failure = same[0]
            where = sample.row.where.removeprefix(prefix).lstrip(_BETWEEN)
            table.add_row(kind, str(len(same)), escape(f"{where}: {failure.message}"))
        console.print()
        console.print(table)
    times = sorted(sample.seconds for sample in samples)
    if times:
        late = times[min(len(times) - 1, int(0.95 * len(times)))]
        console.print()
        console.print(
            f"time a sample: median {_ms(statistics.median(times))}, 95% within {_ms(late)}, longest {_ms(times[-1])}"
        )
        slowest = sorted(samples, key=lambda sample: -sample.seconds)[:ROWS]
        console.print()
        console.print(_rows_table("slowest samples", slowest, prefix))


_SPREAD_HEADERS = ("samples", "mean", "std", "min", "max")


def _common_place(samples: Sequence[TrialSample]) -> str:
    """The file that all rows are of; empty where there are several."""
    places = {sample.row.where.rpartition(_BETWEEN)[0] for sample in samples}
    return places.pop() if len(places) == 1 else ""


def _rows_table(title: str, samples: Sequence[TrialSample], prefix: str) -> Table:
    """A line for each sample; `prefix` is the file that is not repeated in each."""
    table = _table(title, "row", "score", "time", "answer found", "ground truth", "end of response")
    for sample in samples:
        outcome = sample.outcome
        scored = isinstance(outcome, Score)
        score = f"{outcome.value:g}" if isinstance(outcome, Score) else str(outcome.kind)
        pred = outcome.extras.get("pred") if isinstance(outcome, Score) else None
        table.add_row(
            escape(sample.row.where.removeprefix(prefix).lstrip(_BETWEEN)),
            score if scored else f"[red]{score}[/red]",
            _ms(sample.seconds),
            escape(_short(pred)),
            escape(_short(sample.row.ground_truth)),
            escape(_short(sample.response, end=True)),
        )
    return table


def _row(sample: TrialSample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "where": sample.row.where,
        "data_source": sample.row.data_source,
        "function": sample.function,
        "response": sample.response,
        "seconds": sample.seconds,
        "score": None,
        "failure": None,
    }
    if isinstance(sample.outcome, Failure):
        row["failure"] = {
            "kind": str(sample.outcome.kind),
            "message": sample.outcome.message,
            "retryable": sample.outcome.retryable,
        }
    else:
        row["score"] = sample.outcome.value
        row["components"] = dict(sample.outcome.components)
        row["extras"] = {name: _plain(value) for name, value in sample.outcome.extras.items()}
    return row


def _plain(value: Any) -> Any:
    """The value where JSON has it, else its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return repr(value)


def _by_source(
    samples: Iterable[TrialSample],
) -> dict[tuple[str | None, str | None], list[TrialSample]]:
    return _grouped(samples, lambda sample: (sample.row.data_source, sample.function))


def _grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def _scores(samples: Iterable[TrialSample]) -> list[float]:
    return [sample.outcome.value for sample in samples if isinstance(sample.outcome, Score)]


def _components(samples: Iterable[TrialSample]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if isinstance(sample.outcome, Score):
            for name, figure in sample.outcome.components.items():
                found[name].append(figure)
    return dict(found)


def _failures(samples: Iterable[TrialSample]) -> list[tuple[TrialSample, Failure]]:
    return [(s, s.outcome) for s in samples if isinstance(s.outcome, Failure)]


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _spread(figures: Sequence[float]) -> list[str]:
    spread = Spread.of(figures)
    shown = (spread.mean, spread.std, spread.low, spread.high)
    return [str(spread.count), *("–" if figure is None else f"{figure:.4g}" for figure in shown)]


def _short(value: Any, *, end: bool = False) -> str:
    text = " ".join(str("–" if value is None else value).split())
    if len(text) <= _WIDTH:
        return text
    return f"…{text[1 - _WIDTH :]}" if end else f"{text[: _WIDTH - 1]}…"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
