"""`naive`: runs reward functions in this process, each call in a daemon thread or on a loop of its own."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, ClassVar

from dovetail.errors import ConfigError, DovetailError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.reward import (
    Failure,
    FailureKind,
    Outcome,
    RewardManager,
    RewardSample,
    RewardUnit,
)
from dovetail.interfaces.reward_calls import (
    RewardCall,
    RewardFunctions,
    failure_from,
    outcome_from,
)
from dovetail_rewards.config import NaiveConfig
from dovetail_rewards.managers.event_loop import AsyncLane
from dovetail_rewards.managers.threads import DaemonThreads, HungCalls, TooManyHungError


class NaiveManager(RewardManager):
    """Scores single samples as they come.

    A function that hangs blocks neither generation nor the end of the process: when the Scorer gives the sample up, its
    thread is left behind and replaced. What holds the interpreter's lock for ever (a regular
    expression that backtracks without end) cannot be left behind: that takes a process of its own.
    """

    name: ClassVar[str] = "naive"
    api: ClassVar[str] = ">=1.0,<2"
    capabilities: ClassVar[frozenset[str]] = frozenset({"timeout", "async_functions"})
    Config: ClassVar[type[NaiveConfig]] = NaiveConfig

    def __init__(self, config: NaiveConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._hung = HungCalls(config.max_hung)
        self._threads = DaemonThreads(self._hung)
        self._lane = AsyncLane(self._hung)

    @property
    def capacity(self) -> int:
        return int(self.config.workers)

    @property
    def hung(self) -> int:
        """Calls that were given up and still run."""
        return self._hung.count

    def start(self) -> None:
        """Check that there are functions to run.

        Raises:
            ConfigError: the context holds no RewardFunctions.
        """
        if not isinstance(self.context.reward_functions, RewardFunctions):
            raise ConfigError(
                "reward manager 'naive' was given no reward functions "
                f"(context.reward_functions is {self.context.reward_functions!r})",
                hint="pass PluginContext(reward_functions=RewardFunctions(default=compute_score))",
            )

    async def score(self, unit: RewardUnit) -> list[Outcome]:
        if len(unit.samples) == 1:
            return [await self._score(unit.samples[0])]
        return list(await asyncio.gather(*(self._score(sample) for sample in unit.samples)))

    def close(self) -> None:
        self._threads.close()
        self._lane.close()

    async def _score(self, sample: RewardSample) -> Outcome:
        try:
            call = self.context.reward_functions.function_for(sample.data_source)
        except DovetailError as error:
            return Failure(kind=FailureKind.EXCEPTION, message=error.message)
        try:
            value = await self._value(call, sample)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return failure_from(error, call)  # the function's own, not ours
        except TooManyHungError as error:
            return Failure(kind=FailureKind.CRASH, message=f"{call.name} was not called: {error}")
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            return failure_from(error, call)
        return outcome_from(value, call.name)

    async def _value(self, call: RewardCall, sample: RewardSample) -> Any:
        if call.is_async:
            return await self._lane.run(call(sample))
        value = await self._threads.run(lambda: call(sample))
        return await self._lane.run(value) if inspect.isawaitable(value) else value
