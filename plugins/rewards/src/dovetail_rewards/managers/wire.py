"""The messages between a manager and its worker processes: pickles to the worker, plain JSON back.

A worker runs unchecked code, so nothing that it sends is unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dovetail.interfaces import Failure, FailureKind, Outcome, Sample, Score
from dovetail_rollouts import finite_float

_CUT = 1000
"""Maximum length of a repr that replaces a value, in characters."""


class Garbled(ValueError):
    """The received data does not follow the workers' protocol."""


def arguments_of(sample: Sample, seen: frozenset[str]) -> dict[str, Any]:
    """Return the arguments with which a worker calls a reward function on a sample.

    These are the arguments named in `seen`, and `data_source`, by which the worker selects the function.
    """
    keep = seen | {"data_source"}
    return {name: value for name, value in sample.arguments().items() if name in keep}


def pack_outcome(outcome: Outcome) -> str:
    """Return an outcome (a score or a failure) as JSON. A score's `extras` that JSON can't represent are replaced by their repr."""
    if isinstance(outcome, Failure):
        return json.dumps(["failure", str(outcome.kind), outcome.message, outcome.retryable])
    rewards = None if outcome.token_rewards is None else outcome.token_rewards.tolist()
    body = ["score", outcome.value, rewards, outcome.turn_rewards, dict(outcome.components)]
    try:
        return json.dumps([*body, dict(outcome.extras)], default=_plain)
    except (TypeError, ValueError, RecursionError):
        return json.dumps([*body, {key: _shown(part) for key, part in outcome.extras.items()}])


def unpack_outcome(text: Any) -> Outcome:
    """Return the score or the failure from the text that `pack_outcome` returned.

    Raises:
        Garbled: the text is not an outcome.
    """
    try:
        what, *body = json.loads(text)
        if what == "failure":
            kind, message, retryable = body
            return Failure(kind=FailureKind(kind), message=str(message), retryable=bool(retryable))
        value, rewards, by_turn, components, extras = body
        score = finite_float(value)
        figures = {str(key): finite_float(part) for key, part in components.items()}
        if what != "score" or score is None or None in figures.values():
            raise Garbled("a score is not a finite number")
        return Score(
            value=score,
            token_rewards=None if rewards is None else np.asarray(rewards, np.float32),
            turn_rewards=None if by_turn is None else tuple(map(float, by_turn)),
            components={key: part for key, part in figures.items() if part is not None},
            extras=dict(extras),
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Garbled(f"{type(error).__name__}: {error}") from error


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else _shown(value)


def _shown(value: object) -> str:
    try:
        return repr(value)[:_CUT]
    except Exception as error:  # noqa: BLE001 - a user's own __repr__ may raise anything
        return f"<no repr: {type(error).__name__}>"
