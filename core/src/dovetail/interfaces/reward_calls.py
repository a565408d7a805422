"""Reward functions as managers use them: found by `data_source`, called by name, their answers judged."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import ConfigError, nearest
from dovetail.interfaces.reward import (
    Failure,
    FailureKind,
    Outcome,
    RewardSample,
    Score,
)

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a reward function may ask for, by name."""
ANSWER = "pred"
"""What a reward function calls the answer that it found in a response: something to vote on, never a figure."""

_LARGEST = float(np.finfo(np.float32).max)


class RewardCall:
    """A reward function, ready to be called with a sample.

    Args:
        function: a plain function (also async) with any of `PARAMETERS`, or with `**kwargs`.
        name: what messages call it, such as `my_reward.py:compute_score`.

    Raises:
        ConfigError: the function needs a parameter that rewards are not given.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = str(name or getattr(function, "__qualname__", type(function).__name__))
        self._positional, self._keywords = _parameters(function, self.name)

    @property
    def is_async(self) -> bool:
        """Calling it makes a coroutine and runs none of its code."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def file(self) -> str | None:
        """The source file that the function's code comes from."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return code.co_filename if code is not None else None

    def __call__(self, sample: RewardSample) -> Any:
        """What the function returns for this sample; an awaitable where it is async."""
        positional = [getattr(sample, name) for name in self._positional]
        return self.function(
            *positional, **{name: getattr(sample, name) for name in self._keywords}
        )

    def __repr__(self) -> str:
        return f"RewardCall({self.name})"


class RewardFunctions:
    """Which function scores a row: the one for its `data_source`, or the one for every row.

    Core makes it from the reward section and hands it to a manager as `context.reward_functions`.
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

    def function_for(self, data_source: str | None) -> RewardCall:
        """The function that scores rows of this source.

        Raises:
            ConfigError: there is none.
        """
        call = self._by_source.get(data_source or "", self._default)
        if call is None:
            raise ConfigError(
                f"no reward function for data_source {data_source!r}; "
                f"there are: {', '.join(sorted(self._by_source)) or 'none'}",
                hint="set reward.function, or reward.functions for each data_source",
            )
        return call


def outcome_from(value: Any, name: str) -> Outcome:
    """Judge what a reward function returned.

    Args:
        value: a finite number (int, float, bool or a NumPy scalar), or a mapping with `score` and further
            parts: finite numbers become components, the rest extras, and so does `pred`, the answer that was found
            in the response, whatever it is. All else is a failure.
        name: the function, for messages.
    """
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            return _invalid(
                name, f"a mapping without 'score' (keys: {', '.join(map(str, value)) or 'none'})"
            )
        parts = {str(key): part for key, part in value.items() if key != "score"}
        value = value["score"]
    score = finite_float(value)
    if score is None:
        return _invalid(name, _described(value))
    figures = {key: None if key == ANSWER else finite_float(part) for key, part in parts.items()}
    return Score(
        value=score,
        components={key: figure for key, figure in figures.items() if figure is not None},
        extras={key: part for key, part in parts.items() if figures[key] is None},
    )


def finite_float(value: Any) -> float | None:
    """The value as a float where it is a number, finite in float32; None for all else."""
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None  # neither NaN nor infinity is


def failure_from(error: BaseException, call: RewardCall) -> Failure:
    """What an exception inside a reward function means, with the line that raised it.

    A refused or lost connection, or a time-out of the function's own, may be tried again.
    """
    kind = FailureKind.EXCEPTION
    if isinstance(error, TimeoutError):
        kind = FailureKind.TIMEOUT
    elif isinstance(error, ConnectionError):
        kind = FailureKind.UNREACHABLE
    # format_exception_only survives an exception whose own __str__ raises
    what = _cut(traceback.format_exception_only(error)[-1].strip(), 300)
    message = f"{call.name} raised {what}{_where(error, call.file)}"
    return Failure(kind=kind, message=message, retryable=kind is not FailureKind.EXCEPTION)


def _where(error: BaseException, file: str | None) -> str:
    """` (my_reward.py, line 7, in compute_score)`: the deepest line in the function's own file."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if error.__cause__ is not None:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), None)
    if frame is None:
        return ""
    return f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"


def _invalid(name: str, what: str) -> Failure:
    message = f"{name} returned {what}; a reward is a finite number, or a mapping with 'score'"
    return Failure(kind=FailureKind.INVALID_VALUE, message=message)


def _described(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's own __repr__ may raise anything
        text = f"<no repr: {type(error).__name__}>"
    return f"{_cut(text, 80)} ({type(value).__name__})"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _parameters(function: Callable[..., Any], name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names to pass by position, and by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled functions have none
        return (), PARAMETERS
    positional: list[str] = []
    keywords: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords = [known for known in PARAMETERS if known not in positional]
            break
        if parameter.name not in PARAMETERS:
            if parameter.default is parameter.empty:
                raise _unknown_parameter(name, parameter.name)
            continue
        (positional if parameter.kind is parameter.POSITIONAL_ONLY else keywords).append(
            parameter.name
        )
    return tuple(positional), tuple(keywords)


def _unknown_parameter(name: str, parameter: str) -> ConfigError:
    if parameter in {f"{known}s" for known in PARAMETERS} | {"responses", "solutions"}:
        problem = f"{name} takes lists ({parameter!r}); rewards are computed one sample at a time"
    else:
        close = nearest(parameter, PARAMETERS)
        problem = f"{name} needs a parameter {parameter!r} that a reward is not given"
        problem += f"; nearest: {close!r}" if close else ""
    return ConfigError(
        problem, hint=f"write def compute_score({', '.join(PARAMETERS[:3])}, extra_info=None)"
    )
