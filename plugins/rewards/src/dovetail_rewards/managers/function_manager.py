"""Common parts of managers that call reward functions: selection of the function, the cache, and conversion of errors to failures."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.errors import ConfigError, DovetailError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginConfig,
    PluginContext,
    RewardManager,
    RunningTime,
    Sample,
)
from dovetail_rewards.managers.cache import OutcomeCache
from dovetail_rewards.managers.event_loop import AsyncLane
from dovetail_rewards.managers.threads import DaemonThreads, HungCalls, TooManyHungError
from dovetail_rollouts import RewardCall, RewardFunctions, failure_from, outcome_from


class FunctionManager(RewardManager):
    """Scores samples one by one, each with the reward function for its data source. A subclass decides how functions are called.

    A subclass's Config extends `CachingConfig`.
    """

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self.cache = OutcomeCache(config.cache_size)

    def start(self) -> None:
        """Check that the manager's context has reward functions.

        Raises:
            ConfigError: the context has no reward functions.
        """
        require_functions(type(self).name, self.context)

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        if len(samples) == 1:
            return [await self._score(samples[0], time)]
        return list(await asyncio.gather(*(self._score(s, time) for s in samples)))

    async def _score(self, sample: Sample, time: RunningTime) -> Outcome:
        call = function_of(self.context.reward_functions, sample.prompt.data_source)
        if isinstance(call, Failure):
            return call
        if call.unit == "group":
            message = (
                f"reward function {call.name} scores whole groups, but reward manager {type(self).name!r} passes single samples; "
                "set reward.manager.name=group"
            )
            return Failure(kind=FailureKind.EXCEPTION, message=message)
        return await self._cached(call, sample, time)

    async def _cached(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        """Return the outcome of a call on one sample, from the cache if possible."""
        key = self.cache.key(call, sample)
        outcome: Outcome | None = self.cache.get(key)
        if outcome is None:
            outcome = await self._run(call, sample, time)
            self.cache.put(key, outcome)
        return outcome

    @abstractmethod
    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        """Call the function; a failing sample gives a Failure, not an exception."""


class InProcessCalls:
    """Calls reward functions in this process: sync functions in daemon threads, async functions on a persistent event loop."""

    def __init__(self, max_hung: int) -> None:
        self._hung = HungCalls(max_hung)
        self._threads = DaemonThreads(self._hung)
        self._lane = AsyncLane(self._hung)

    @property
    def hung(self) -> int:
        """The number of calls that timed out and still run."""
        return self._hung.count

    async def outcome(self, call: RewardCall, make: Callable[[], Any]) -> Outcome:
        """Call a reward function, and return its score or failure.

        Args:
            call: the reward function.
            make: a function without parameters that calls the reward function with its arguments and returns what it returns.
        """
        value = await self.value(call, make)
        return value if isinstance(value, Failure) else outcome_from(value, call.name)

    async def value(self, call: RewardCall, make: Callable[[], Any]) -> Any:
        """Call a reward function, and return its result, or a Failure for its exception; a cancellation of this task is raised."""
        try:
            if call.is_async:
                return await self._lane.run(make())
            value = await self._threads.run(make)
            return await self._lane.run(value) if inspect.isawaitable(value) else value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return failure_from(error, call)  # the function raised it; this task was not cancelled
        except TooManyHungError as error:
            return Failure(
                kind=FailureKind.CRASH,
                message=f"reward function {call.name} was not called: {error}",
            )
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            return failure_from(error, call)

    def close(self) -> None:
        """End idle threads and the event loop; hanging calls end with the process. Safe to call twice."""
        self._threads.close()
        self._lane.close()


def require_functions(manager: str, context: PluginContext) -> RewardFunctions:
    """Return the reward functions of a manager's context.

    Raises:
        ConfigError: the context has no reward functions.
    """
    functions = context.reward_functions
    if not isinstance(functions, RewardFunctions):
        raise ConfigError(
            f"reward manager {manager!r} has no reward functions: "
            f"context.reward_functions is {functions!r}; expected a RewardFunctions",
            hint="pass PluginContext(reward_functions=RewardFunctions(default=compute_score))",
        )
    return functions


def function_of(functions: RewardFunctions, data_source: str | None) -> RewardCall | Failure:
    """Return the reward function for samples of this data source, or a Failure if the run has none."""
    try:
        return functions.function_for(data_source)
    except DovetailError as error:
        return Failure(kind=FailureKind.EXCEPTION, message=error.message)
