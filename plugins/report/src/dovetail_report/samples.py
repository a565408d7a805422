"""Samples of a run as its report shows them, from `samples/step_N.jsonl`: one sample a line with prompt, response and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.telemetry import figures, read_rows
from dovetail_report.episode_section import episode
from dovetail_report.text import as_text, shorten

_SHOWN = 4
"""Samples of a step that a report shows."""


def shown_samples(directory: Path) -> list[dict[str, Any]]:
    """Samples of the first and the last step that have some: a label, the step, and rows."""
    names = (
        path.stem.removeprefix("step_") for path in (directory / "samples").glob("step_*.jsonl")
    )
    steps = sorted(int(name) for name in names if name.isdecimal())
    shown = []
    for label, step in (("Early", steps[0]), ("Late", steps[-1])) if steps else ():
        rows = _of_different_prompts(read_rows(directory / "samples" / f"step_{step}.jsonl"))
        shown.append({"label": label, "step": step, "rows": [_sample(row) for row in rows]})
    return shown[:1] if len(steps) == 1 else shown


def _of_different_prompts(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few rows, one a prompt; several only of a single prompt, where there is no other to show."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        first.setdefault(as_text(row.get("prompt")), row)
    return list(first.values() if len(first) > 1 else rows)[:_SHOWN]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    score = row.get("score")
    failure = row.get("failure")
    if isinstance(failure, Mapping):
        failure = f"{failure.get('kind', 'failed')}: {failure.get('message', '')}"
    return {
        "prompt": shorten(as_text(row.get("prompt"))),
        "response": shorten(as_text(row.get("response"))),
        "score": _judged(row),
        "good": (figures.is_number(score) and score > 0) or row.get("side") == "chosen",
        "failure": str(failure) if failure else "",
        "truth": shorten(as_text(row.get("ground_truth"))),
        "episode": episode(row),
    }


def _judged(row: Mapping[str, Any]) -> str:
    """A sample's score, or which answer of its pair it is; nothing of an example that is not compared."""
    if "score" not in row:
        return str(row.get("side", ""))
    return f"score {row['score']:.3g}" if figures.is_number(row["score"]) else "score none"
