"""Reward functions as managers use them: found by `data_source`, called by name.

What they return is judged by `reward_answers`, whose names stand here too.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.contained import error_text
from dovetail.interfaces.reward import Failure, FailureKind, Sample
from dovetail.interfaces.reward_answers import entries_of
from dovetail.interfaces.reward_signature import Form, signature_of
from dovetail.interfaces.runtime import PluginRef


class RewardCall:
    """A reward function, ready to be called with samples.

    Args:
        function: a plain function (also async) with any of `PARAMETERS`, or with `**kwargs`; on lists
            (`solution_strs`, `ground_truths`, …), or on pairs (`solution_a`, `solution_b`).
        name: what messages call it, such as `my_reward.py:compute_score`.

    Raises:
        ConfigError: the function needs a parameter that rewards are not given.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function = function
        self.name = str(name or getattr(function, "__qualname__", type(function).__name__))
        self._signature = signature_of(function, self.name)

    @property
    def form(self) -> Form:
        """What a call gets: one sample, lists over samples, or a pair."""
        return self._signature.form

    @property
    def fields(self) -> frozenset[str]:
        """Keys of `Sample.arguments` that the function sees."""
        return self._signature.fields

    @property
    def is_async(self) -> bool:
        """Calling it makes a coroutine and runs none of its code."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def pure(self) -> bool:
        """Whether it says that the same parameters always get the same answer."""
        return bool(self._declared("pure", False))

    @property
    def unit(self) -> str:
        """`group` where its scores depend on the other samples of a group."""
        return "group" if self.form == "pair" else str(self._declared("unit", "sample"))

    @property
    def file(self) -> str | None:
        """The source file that the function's code comes from."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return code.co_filename if code is not None else None

    def __call__(self, sample: Sample) -> Any:
        """What the function returns for this sample; an awaitable where it is async.

        A function on lists gets lists of one.
        """
        return self.with_arguments(sample.arguments())

    def with_arguments(self, arguments: Mapping[str, Any]) -> Any:
        """Return the same for what `Sample.arguments` has returned, as in another process; it may lack what is not in `fields`."""
        if self.form == "list":
            answer = self._on_list([arguments])
            return _first_later(answer) if inspect.isawaitable(answer) else _first(answer)
        return self._call(lambda name: arguments[name])

    def on_list(self, samples: Sequence[Sample]) -> Any:
        """Return what a function on lists returns for these samples; judge it by `outcomes_from`."""
        return self._on_list([sample.arguments() for sample in samples])

    def on_pair(self, first: Sample, second: Sample) -> Any:
        """Return what a function on pairs returns: how far the first response is the better one, from 0 to 1."""
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

    def _declared(self, what: str, default: object) -> Any:
        """An attribute of the function, or of the RewardFunction that it is a method of."""
        owner = getattr(self.function, "__self__", None)
        return getattr(self.function, what, getattr(owner, what, default))

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

    def files(self) -> tuple[PluginRef, ...]:
        """Return functions that come from files: another process loads them before it unpickles this."""
        return ()

    def function_for(self, data_source: str | None) -> RewardCall:
        """Return the function that scores rows of this source.

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


def failure_from(error: BaseException, call: RewardCall) -> Failure:
    """Return what an exception inside a reward function means, with the line that raised it.

    A refused or lost connection, or a time-out of the function's own, may be tried again.
    """
    kind = FailureKind.EXCEPTION
    if isinstance(error, TimeoutError):
        kind = FailureKind.TIMEOUT
    elif isinstance(error, ConnectionError):
        kind = FailureKind.UNREACHABLE
    message = f"{call.name} raised {error_text(error)}{_where(error, call.file)}"
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


def _first(answer: object) -> Any:
    """The only entry of what a function on lists returned; anything else as it is, and so no reward."""
    entries = entries_of(answer)
    return entries[0] if entries is not None and len(entries) == 1 else answer


async def _first_later(answer: Awaitable[Any]) -> Any:
    return _first(await answer)
