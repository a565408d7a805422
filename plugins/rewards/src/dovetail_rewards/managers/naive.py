"""`naive`: runs reward functions in this process, each call in a daemon thread or on a loop of its own."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces import (
    Outcome,
    PluginConfig,
    PluginContext,
    RewardCall,
    RunningTime,
    Sample,
    outcome_from,
)
from dovetail_rewards.manager_config import CachingConfig, NaiveConfig
from dovetail_rewards.managers.function_manager import FunctionManager, InProcessCalls


class NaiveManager(FunctionManager):
    """Scores single samples as they come.

    A function that hangs blocks neither generation nor the end of the process: when the Scorer gives the sample up, its
    thread is left behind and replaced. What holds the interpreter's lock for ever (a regular
    expression that backtracks without end) cannot be left behind: that takes a process of its own (`parallel`).
    """

    name = "naive"
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "async_functions"})
    Config: ClassVar[type[CachingConfig]] = NaiveConfig

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._calls = InProcessCalls(config.max_hung)

    @property
    def capacity(self) -> int:
        return int(self.config.workers)

    @property
    def hung(self) -> int:
        """Calls that were given up and still run."""
        return self._calls.hung

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        return await self._calls.outcome(
            call, lambda: call(sample), lambda value: outcome_from(value, call.name)
        )

    def close(self) -> None:
        self._calls.close()
