"""What comes back from a reward function, judged: a score, or a failure that says what was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.interfaces.reward import Failure, FailureKind, Outcome, Score
from dovetail.text import encodable

TOKEN_REWARDS = "token_rewards"  # noqa: S105 - tokens of a language model
"""What a reward function calls its rewards of single tokens."""
TURN_REWARDS = "turn_rewards"
"""What a reward function calls its rewards of an episode's turns."""
ANSWER = "pred"
"""What a reward function calls the answer that it found in a response: something to vote on, never a figure."""

_LARGEST = float(np.finfo(np.float32).max)


def outcome_from(value: object, name: str) -> Outcome:
    """Judge what a reward function returned for one sample.

    Args:
        value: a finite number (int, float, bool or a NumPy scalar), or a mapping with `score` and further
            parts: finite numbers become components, the rest extras, and so does `pred`, the answer that was found
            in the response, whatever it is. `token_rewards` in the mapping are rewards of single tokens, T finite
            numbers, and `turn_rewards` those of an episode's turns; `score` is then their sum, and may be left out. All else is a
            failure.
        name: the function, for messages.
    """
    parts: Mapping[Any, Any] = {}
    rewards_T = by_turn = None
    if isinstance(value, Mapping):
        parts = {encodable(str(key)): part for key, part in value.items()}
        found = {}
        for key in (TOKEN_REWARDS, TURN_REWARDS):
            if parts.get(key) is None:
                continue
            rewards = _rewards(parts[key])
            if rewards is None:
                return _invalid(name, f"{key} = {_described(parts[key])}")
            found[key] = rewards
            parts.setdefault("score", float(rewards.sum(dtype=np.float64)))
        rewards_T, by_turn = found.get(TOKEN_REWARDS), found.get(TURN_REWARDS)
        if "score" not in parts:
            return _invalid(name, f"a mapping without 'score' (keys: {', '.join(parts) or 'none'})")
        value = parts["score"]
        parts = {
            key: part
            for key, part in parts.items()
            if key not in ("score", TOKEN_REWARDS, TURN_REWARDS)
        }
    score = finite_float(value)
    if score is None:
        return _invalid(name, _described(value))
    figures = {key: None if key == ANSWER else finite_float(part) for key, part in parts.items()}
    return Score(
        value=score,
        token_rewards=rewards_T,
        turn_rewards=None if by_turn is None else tuple(by_turn.tolist()),
        components={key: figure for key, figure in figures.items() if figure is not None},
        extras={key: part for key, part in parts.items() if figures[key] is None},
    )


def outcomes_from(value: object, count: int, name: str) -> list[Outcome]:
    """Judge what a reward function on lists returned: each entry by itself, as `outcome_from` does.

    Args:
        value: a list, a tuple or an array of `count` entries. Anything else fails every sample, since nobody can tell
            which entry belongs to which.
        count: samples that it was called with.
        name: the function, for messages.
    """
    entries = entries_of(value)
    if entries is None:
        failure = _invalid(name, f"{_described(value)} for {count} samples", "a list of rewards")
    elif len(entries) != count:
        failure = _invalid(
            name, f"{len(entries)} rewards for {count} samples", "one for each, in order"
        )
    else:
        return [outcome_from(entry, name) for entry in entries]
    return [failure] * count


def finite_float(value: object) -> float | None:
    """Return the value as a float where it is a number, finite in float32; None for all else."""
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None  # neither NaN nor infinity is


def entries_of(value: Any) -> Sequence[Any] | None:
    """Return the entries of a list, a tuple, or a one-dimensional array or tensor; None for anything else."""
    if isinstance(value, (list, tuple)):
        return value
    if getattr(value, "ndim", None) == 1 and callable(getattr(value, "tolist", None)):
        listed = value.tolist()
        return listed if isinstance(listed, list) else None
    return None


def cut(text: str, length: int) -> str:
    """Return a text for a message, no longer than this."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _invalid(
    name: str, what: str, wanted: str = "a finite number, or a mapping with 'score'"
) -> Failure:
    message = f"{name} returned {what}; a reward is {wanted}"
    return Failure(kind=FailureKind.INVALID_VALUE, message=message)


def _rewards(value: object) -> np.ndarray | None:
    """float32, one for each entry, or None where they are not a list of finite numbers."""
    entries = entries_of(value)
    if entries is None or any(finite_float(entry) is None for entry in entries):
        return None
    return np.asarray(entries, np.float32)


def _described(value: object) -> str:
    """A value for a message, cut to a readable length."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's own __repr__ may raise anything
        text = f"<no repr: {type(error).__name__}>"
    return f"{cut(text, 80)} ({type(value).__name__})"
