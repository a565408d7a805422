"""The report of `dovetail reward try`: every sample; scores, components and seconds by data source; and failures."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dovetail.interfaces import Failure
from dovetail_rollouts import TrialSample

SCHEMA = 2
ROWS = 10
"""Maximum number of samples and of distinct error messages that the printed report lists."""
_COLUMNS = ("row", "score", "seconds", "failure", "message", "pred", "ground_truth", "response")
_WIDTHS = {"message": 120, "first": 500}
"""Maximum characters of a printed cell, by column; 48 for other columns."""
_VALUES = re.compile(r"(?<!\w)(['\"`]).*?\1(?!\w)|-?\d+(?:\.\d+)?")
"""Pattern of quoted texts and numbers. Error messages that differ only in these are counted as one error."""


def report_of(samples: Sequence[TrialSample]) -> dict[str, Any]:
    """Return the report on scored samples as JSON: `samples`; `figures` (statistics by data source and function); `errors` by frequency."""
    rows = [_row(sample) for sample in samples]
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        of = row["data_source"] or "none", row["function"] or "the manager's own"
        figures = {"score": row["score"], **row["components"], "seconds": row["seconds"]}
        for name, value in figures.items():
            if value is not None:
                values[*of, name].append(value)
        if row["failure"]:
            gist = _VALUES.sub("", row["message"][:500])
            alike[row["failure"], gist].append(f"{row['row']}: {row['message']}")
    return {
        "schema": SCHEMA,
        "figures": [
            {
                **dict(zip(("data_source", "function", "of"), of, strict=True)),
                "samples": len(found),
                "mean": statistics.fmean(found),
                "std": statistics.pstdev(found),
                "min": min(found),
                "max": max(found),
            }
            for of, found in values.items()
        ],
        "errors": [
            {"kind": kind, "samples": len(said), "first": said[0]}
            for (kind, _), said in sorted(alike.items(), key=lambda each: -len(each[1]))
        ],
        "samples": rows,
    }


def show(trial: Mapping[str, Any], console: Console) -> None:
    """Print a report from `report_of`: the first samples, the statistics, and the most frequent errors."""
    taken = Counter(row["taken_from"] for row in trial["samples"])
    places = ", ".join(f"{place} ({count})" for place, count in taken.items())
    console.print(f"{len(trial['samples'])} responses from {escape(places)}")
    rows = [{key: _in_ms(row)[key] for key in _COLUMNS} for row in trial["samples"][:ROWS]]
    _table(console, "rows" if len(trial["samples"]) <= ROWS else "first rows", rows)
    _table(console, "figures", [_in_ms(f) if f["of"] == "seconds" else f for f in trial["figures"]])
    if set(taken) == {"ground_truth"} and not any(
        (row["score"] or 0) > 0 for row in trial["samples"]
    ):
        console.print(
            "→ the rows have no responses, so their ground truths were scored instead: a reward that expects a marked answer "
            "(#### …, \\boxed{…}) finds none in them; use --responses FILE to score real responses",
            markup=False,
            soft_wrap=True,
        )
    _table(console, "errors", trial["errors"][:ROWS])


def _row(sample: TrialSample) -> dict[str, Any]:
    outcome = sample.outcome
    row: dict[str, Any] = {
        "row": sample.prompt.where,
        "data_source": sample.prompt.data_source,
        "function": sample.function,
        "taken_from": sample.taken_from,
        "ground_truth": _plain(sample.prompt.ground_truth),
        "response": sample.response,
        "seconds": sample.seconds,
        **dict.fromkeys(("score", "failure", "message", "pred")),
        "components": {},
    }
    if isinstance(outcome, Failure):
        return row | {"failure": str(outcome.kind), "message": outcome.message, "extras": {}}
    extras = {key: _plain(value) for key, value in outcome.extras.items()}
    # The manager `hybrid` prefixes the extras of a scorer: `scorer/pred`.
    named = {key.rpartition("/")[2]: value for key, value in extras.items() if value is not None}
    row |= {"message": named.get("first_failure"), "pred": named.get("pred")}
    return row | {"score": outcome.value, "components": dict(outcome.components), "extras": extras}


def _plain(value: object) -> Any:
    """Return a value unchanged if it is a text, bool, integer or None, else its repr."""
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _in_ms(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table with its durations, which are in seconds, as text in milliseconds."""
    keys = ("seconds",) if "seconds" in row else ("mean", "std", "min", "max")
    return {key: f"{1000 * v:.3g} ms" if key in keys else v for key, v in row.items()}


def _table(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table, without empty columns; print nothing if there are no rows."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    headers = [key for key in rows[0] if any(row[key] is not None for row in rows)] if rows else []
    for header in headers:
        table.add_column(header.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(header, row[header])) for header in headers))
    if rows:
        console.print()
        console.print(table)


def _cell(header: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = " ".join(str("–" if value is None else value).split())
    width = _WIDTHS.get(header, 48)
    if len(text) <= width:
        return text
    return f"…{text[1 - width :]}" if header == "response" else f"{text[: width - 1]}…"
