"""The reward manager `naive`: runs reward functions in this process, in daemon threads or on an event loop of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from dovetail.interfaces import Failure, Outcome, PluginContext, RunningTime, Sample
from dovetail_rewards.manager_config import NaiveConfig
from dovetail_rewards.managers.budget import Budget, Spending
from dovetail_rewards.managers.function_manager import FunctionManager, InProcessCalls
from dovetail_rollouts import RewardCall, finite_float, outcome_from


class NaiveManager(FunctionManager):
    """Scores each sample by itself when it arrives.

    A hanging function does not block generation or the end of the process: at the time limit, its thread is abandoned and replaced. A
    function that never releases the interpreter's lock (a regular expression with endless backtracking) needs a separate process
    (`parallel`).

    With `requests_per_minute` or `tokens_per_minute`, calls keep to a budget, for functions that use a service. A call's tokens are
    estimated from prompt and response. If the function returns a mapping with `usage` (a number of tokens, or a mapping with
    `total_tokens`), that number replaces the estimate. Waiting for the budget does not count as running time. Every retry is charged;
    cached scores are free.
    """

    name = "naive"
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "async_functions"})
    Config = NaiveConfig

    def __init__(self, config: NaiveConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._calls = InProcessCalls(config.max_hung)
        limits = (config.requests_per_minute, config.tokens_per_minute)
        self.budget = None if limits == (None, None) else Budget(*limits, window=config.window)

    @property
    def capacity(self) -> int:
        return int(self.config.workers)

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        if self.budget is None:
            return await self._calls.outcome(call, partial(call, sample))
        with time.waiting():
            spending = await self.budget.spend(self._estimate(sample))
        value = await self._calls.value(call, partial(call, sample))
        if isinstance(value, Failure):
            return value
        _correct(spending, value)
        return outcome_from(value, call.name)

    def _estimate(self, sample: Sample) -> float:
        """Return the estimated number of tokens of a call on a sample."""
        prompt = sample.prompt.raw
        if not isinstance(prompt, str):
            prompt = json.dumps(prompt, default=str, ensure_ascii=False)
        characters = len(prompt) + len(sample.text)
        return float(self.config.tokens_per_request + characters / self.config.characters_per_token)

    def close(self) -> None:
        self._calls.close()


def _correct(spending: Spending, value: object) -> None:
    """Replace the estimated tokens by those that the call's result reports, if it reports any."""
    usage = value.get("usage") if isinstance(value, Mapping) else None
    if isinstance(usage, Mapping):
        usage = usage.get("total_tokens")
    tokens = finite_float(usage)
    if tokens is not None and tokens >= 0:
        spending.tokens = tokens
