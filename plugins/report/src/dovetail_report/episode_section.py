"""The section of a report about episodes: their metrics, and each episode turn by turn. Legend: T tokens of a response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import attrs

from dovetail.interfaces import MessageCall, Trajectory, Turn
from dovetail.telemetry import numbers
from dovetail_report.charts import Line, line_chart
from dovetail_report.reward_section import card
from dovetail_report.summary import History
from dovetail_report.text import as_text, shorten

_FIGURE = "episode/"
_MOST_CARDS = 24


def episode_cards(history: History) -> list[dict[str, Any]]:
    """Return a card (title, first and latest value, chart) for each metric of episodes that was non-zero at some step."""
    cards = []
    for name in history.names:
        steps, values = history.series(name)
        if not name.startswith(_FIGURE) or not any(values):
            continue
        title = _label(name.removeprefix(_FIGURE).removesuffix("/mean"))
        style = "percent" if title.startswith("end/") else "seconds" if "seconds" in title else ""
        drawn = card(title, values, partial(numbers.write_figure, style=style))
        drawn["chart"] = line_chart([Line(steps, values)], style=style or "number")
        cards.append(drawn | {"note": ""})
    return cards[:_MOST_CARDS]


def episode(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an episode turn by turn, from a row of `samples/step_N.jsonl`; None for a sample that is a single response.

    `tokens` of a turn are three positions: the start of the turn, its end (exclusive), and the start of the next turn. Tokens between the
    last two positions are observations.
    """
    if row.get("trajectory") is None:
        return None
    trajectory = Trajectory.from_json(row["trajectory"])
    tokens = row.get("tokens") or {"text": [], "mask": []}
    mask_T = tokens["mask"]
    sequences = (
        tokens.get("sequences")
        or [{"length": len(mask_T), "prompt": ""}] * trajectory.sequence_count
    )
    starts = [0, *accumulate(sequence["length"] for sequence in sequences)]
    turns = [
        attrs.evolve(t, start=starts[t.sequence] + t.start, stop=starts[t.sequence] + t.stop)
        for t in trajectory.turns
    ]
    ends = [
        following.start if following.sequence == turn.sequence else starts[turn.sequence + 1]
        for turn, following in pairwise(turns)
    ]
    ends = [*ends, len(mask_T)][: len(turns)]
    begins = [True, *(a.sequence != b.sequence for a, b in pairwise(turns))][: len(turns)]
    return {
        "summary": _summary(trajectory, mask_T),
        "figures": _figures(trajectory, mask_T),
        "untrained": _untrained(row),
        "turns": [
            _turn(turn, tokens, until=end)
            | {
                "sequence": turn.sequence + 1 if first and turn.sequence else None,
                "prompt": shorten(sequences[turn.sequence]["prompt"]) if first else "",
            }
            for turn, end, first in zip(turns, ends, begins, strict=True)
        ],
    }


def _summary(trajectory: Trajectory, mask_T: Sequence[int]) -> str:
    parts = [_count(len(trajectory.turns), "turn"), _count(len(trajectory.calls), "call")]
    if trajectory.sequence_count > 1:
        parts.append(_count(trajectory.sequence_count, "sequence"))
    if mask_T:
        parts.append(_count(len(mask_T), "token"))
    return ", ".join(parts)


def _figures(trajectory: Trajectory, mask_T: Sequence[int]) -> list[tuple[str, str]]:
    """Return the counts and times of an episode, such as its turns, calls and seconds, as (label, text)."""
    known = [
        (
            "Ended by",
            {"done": "the agent loop"}.get(trajectory.end, f"its limit on {trajectory.end}"),
        ),
        ("Turns", str(len(trajectory.turns))),
        ("Calls", str(len(trajectory.calls))),
        ("Seconds", numbers.write_seconds(trajectory.seconds)),
    ]
    if mask_T:
        produced = sum(mask_T)
        known += [("Tokens produced", str(produced)), ("Tokens shown", str(len(mask_T) - produced))]
    return known + [
        (
            _label(name),
            numbers.write_seconds(value) if "seconds" in name else f"{value:g}",
        )
        for name, value in sorted(trajectory.counts.items())
    ]


def _untrained(row: Mapping[str, Any]) -> str:
    """Return why no token of the episode is trained on; empty if the tokens that the policy produced are trained on."""
    if row.get("failure"):
        return "a failed episode has no score"
    if row.get("filtered"):
        return f"dropped by filter {row['filtered']}"
    return f"masked by filter {row['masked']}" if row.get("masked") else ""


def _turn(turn: Turn, tokens: Mapping[str, Any], *, until: int) -> dict[str, Any]:
    """Return a turn and the observations after it, which end before token `until` of the response, where the next turn begins.

    `tokens` has the texts of the response's tokens and, if recorded, their log-probabilities.
    """
    texts_T, logs_T = tokens["text"], tokens.get("log_probs")
    known = [log for log in (logs_T or ())[turn.start : turn.stop] if log is not None]
    return {
        "text": shorten(turn.text),
        "tokens": [turn.start, turn.stop, until],
        "shown": shorten("".join(texts_T[turn.stop : until])),
        "facts": [
            _count(turn.stop - turn.start, "token"),
            str(turn.finish_reason),
            *([f"mean log-probability {fmean(known):.3f}"] if known else []),
            *([f"reward {turn.reward:g}"] if turn.reward else []),
        ],
        "calls": [_call(call) for call in turn.calls],
        "observed": [
            {
                "role": " ".join(filter(None, (message.get("role"), message.get("name")))),
                "content": shorten(as_text(message.get("content"))),
            }
            for message in turn.observed
        ],
        "seen": not texts_T or until > turn.stop,
        "shown_count": _count(until - turn.stop, "token") if until > turn.stop else "",
    }


def _call(call: MessageCall) -> str:
    """Return a call as written in Python, such as `add(a=1, b=2)`."""
    function = call.get("function", {})
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return shorten(f"{function.get('name')}({as_text(arguments)})")
    written = (
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items()
    )
    return shorten(f"{function.get('name')}({', '.join(written)})")


def _label(name: str) -> str:
    """Return an episode metric's name with spaces for underscores, except after the first slash, where a function's name may be."""
    figure, slash, rest = name.partition("/")
    return f"{figure.replace('_', ' ')}{slash}{rest}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
