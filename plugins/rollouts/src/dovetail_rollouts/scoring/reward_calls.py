"""Reward functions as managers use them: selected by `data_source` and called by parameter name. A result becomes a score, or a failure
that says what was wrong.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginRef,
    Sample,
    Score,
    error_text,
)
from dovetail.text import encodable
from dovetail_rollouts.scoring.reward_signature import Form, signature_of

TOKEN_REWARDS = "token_rewards"  # noqa: S105 - tokens of a language model
"""The key of rewards for single tokens in a reward function's result."""
TURN_REWARDS = "turn_rewards"
"""The key of rewards for an episode's turns in a reward function's result."""
ANSWER = "pred"
"""The key of the answer that a reward function found in a response, for majority votes; never a metric."""

_LARGEST = float(np.finfo(np.float32).max)


class RewardCall:
    """A reward function, ready to be called with samples.

    Args:
        function: a function, plain or async, with any of `PARAMETERS` or `**kwargs`. It may take lists instead
            (`solution_strs`, `ground_truths`, …), or a pair (`solution_a`, `solution_b`).
        name: the name in messages, such as `my_reward.py:compute_score`.

    Attributes:
        form: the form of a call: one sample, lists over samples, or a pair.
        fields: keys of `Sample.arguments` that the function gets.
        is_async: whether a call only creates a coroutine.
        pure: whether the function declares that equal arguments always get equal scores.
        unit: `group` if a sample's score depends on the other samples of its group, else `sample`.

    Raises:
        ConfigError: the function needs a parameter that is not passed to reward functions.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = str(name or getattr(function, "__qualname__", type(function).__name__))
        self._signature = signature_of(function, self.name)
        self.form: Form = self._signature.form
        self.fields: frozenset[str] = self._signature.fields
        self.is_async = inspect.iscoroutinefunction(function)
        # `pure` and `unit` are attributes of the function, or of the RewardFunction whose method it is.
        owner = getattr(function, "__self__", None)
        self.pure = bool(getattr(function, "pure", getattr(owner, "pure", False)))
        unit = getattr(function, "unit", getattr(owner, "unit", "sample"))
        self.unit = "group" if self.form == "pair" else str(unit)

    @property
    def file(self) -> str | None:
        """The source file of the function; None if it is not written in Python."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return code.co_filename if code is not None else None

    def __call__(self, sample: Sample) -> Any:
        """Call the function with this sample and return its result; an awaitable if the function is async.

        A function on lists gets lists of length 1.
        """
        return self.with_arguments(sample.arguments())

    def with_arguments(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with the dict that `Sample.arguments` returned, and return its result; a process without the sample can do so.

        The dict needs only the keys in `fields`.
        """
        if self.form == "list":
            answer = self._on_list([arguments])
            return _first_later(answer) if inspect.isawaitable(answer) else _first(answer)
        return self._call(lambda name: arguments[name])

    def on_list(self, samples: Sequence[Sample]) -> Any:
        """Call a function that takes lists, and return its result unchecked; `outcomes_from` checks it."""
        return self._on_list([sample.arguments() for sample in samples])

    def on_pair(self, first: Sample, second: Sample) -> Any:
        """Call a function that takes pairs, and return its result: how much better the first response is, from 0 to 1."""
        a, b = first.arguments(), second.arguments()
        return self._call(
            lambda name: (b if name == "solution_b" else a)[self._signature.field(name)]
        )

    def _on_list(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return self._call(lambda name: [row[self._signature.field(name)] for row in rows])

    def _call(self, value: Callable[[str], Any]) -> Any:
        return self.function(
            *(value(name) for name in self._signature.positional),
            **{name: value(name) for name in self._signature.keywords},
        )

    def __repr__(self) -> str:
        return f"RewardCall({self.name})"


class RewardFunctions:
    """The mapping from rows to reward functions: one for each `data_source`, or one for every row.

    The experience source `rollouts` makes the mapping from the reward section; a reward manager finds the mapping in
    `context.reward_functions`.
    """

    def __init__(
        self,
        by_source: Mapping[str, Callable[..., Any]] | None = None,
        default: Callable[..., Any] | None = None,
    ) -> None:
        self._by_source = {
            source: RewardCall(function) for source, function in (by_source or {}).items()
        }
        self._default = RewardCall(default) if default is not None else None

    def files(self) -> tuple[PluginRef, ...]:
        """Return the functions that come from files, which another process must load before it unpickles this mapping."""
        return ()

    def function_for(self, data_source: str | None) -> RewardCall:
        """Return the function that scores rows of this data source.

        Raises:
            ConfigError: no function scores this data source.
        """
        call = self._by_source.get(data_source or "", self._default)
        if call is None:
            raise ConfigError(
                f"data_source {data_source!r} has no reward function; "
                f"functions exist for: {', '.join(sorted(self._by_source)) or 'none'}",
                hint="set reward.function, or reward.functions for each data_source",
            )
        return call


def failure_from(error: BaseException, call: RewardCall) -> Failure:
    """Convert an exception inside a reward function to a Failure, with the line that raised it.

    The failure is retryable if a connection was refused or lost, or the function raised a TimeoutError.
    """
    kind = FailureKind.EXCEPTION
    if isinstance(error, TimeoutError):
        kind = FailureKind.TIMEOUT
    elif isinstance(error, ConnectionError):
        kind = FailureKind.UNREACHABLE
    message = f"{call.name} raised {error_text(error)}{_where(error, call.file)}"
    return Failure(kind=kind, message=message, retryable=kind is not FailureKind.EXCEPTION)


def outcome_from(value: object, name: str) -> Outcome:
    """Convert a reward function's result for one sample to a Score or a Failure.

    A result is a finite number (int, float, bool or a NumPy scalar), or a mapping with `score`. Any other result is a failure. Further
    keys of the mapping become components if their values are finite numbers, else extras; `pred`, the answer found in the response, is
    always an extra. A missing `score` is the sum of `token_rewards` (T finite numbers) or of `turn_rewards` (one for each
    turn).

    Args:
        value: the result.
        name: the function's name in messages.
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
    """Convert the result of a reward function on lists to outcomes, each entry as in `outcome_from`.

    Args:
        value: a list, a tuple or an array of `count` entries. Any other result fails every sample, since entries can't be
            assigned to samples.
        count: the number of samples in the call.
        name: the function's name in messages.
    """
    entries = entries_of(value)
    if entries is None:
        failure = _invalid(name, f"{_described(value)} for {count} samples", "a list of rewards")
    elif len(entries) != count:
        failure = _invalid(
            name, f"{len(entries)} rewards for {count} samples", "one for each sample, in order"
        )
    else:
        return [outcome_from(entry, name) for entry in entries]
    return [failure] * count


def finite_float(value: object) -> float | None:
    """Return the value as a float if it is a number that is finite in float32; None for any other value."""
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None  # False for NaN and infinity


def entries_of(value: Any) -> Sequence[Any] | None:
    """Return the entries of a list, a tuple, or a one-dimensional array or tensor; None for anything else."""
    if isinstance(value, (list, tuple)):
        return value
    if getattr(value, "ndim", None) == 1 and callable(getattr(value, "tolist", None)):
        listed = value.tolist()
        return listed if isinstance(listed, list) else None
    return None


def _where(error: BaseException, file: str | None) -> str:
    """Return where the function raised, in its own file, such as ` (my_reward.py, line 7, in compute_score)`."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if error.__cause__ is not None:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), None)
    if frame is None:
        return ""
    return f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"


def _first(answer: object) -> Any:
    """Return the only entry of a list function's result; any other result unchanged, which is not a valid reward."""
    entries = entries_of(answer)
    return entries[0] if entries is not None and len(entries) == 1 else answer


async def _first_later(answer: Awaitable[Any]) -> Any:
    return _first(await answer)


def _invalid(
    name: str, what: str, wanted: str = "a finite number, or a mapping with 'score'"
) -> Failure:
    message = f"{name} returned {what}; expected {wanted}"
    return Failure(kind=FailureKind.INVALID_VALUE, message=message)


def _rewards(value: object) -> np.ndarray | None:
    """Convert a list of rewards to float32, one for each entry; None if the value is not a list of finite numbers."""
    entries = entries_of(value)
    if entries is None or any(finite_float(entry) is None for entry in entries):
        return None
    return np.asarray(entries, np.float32)


def _described(value: object) -> str:
    """Return a value and its type as text for a message, cut to a readable length."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's own __repr__ may raise anything
        text = f"<no repr: {type(error).__name__}>"
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{shown} ({type(value).__name__})"
