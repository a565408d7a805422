"""`rate_limited`: `naive` within a budget of requests and tokens a minute."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dovetail.interfaces import (
    Outcome,
    PluginContext,
    RewardCall,
    RunningTime,
    Sample,
    finite_float,
    outcome_from,
)
from dovetail_rewards.manager_config import RateLimitedConfig
from dovetail_rewards.managers.budget import Budget, Spending
from dovetail_rewards.managers.naive import NaiveManager


class RateLimitedManager(NaiveManager):
    """For functions that call a service: one budget over all calls, every retry included.

    At most `requests_per_minute` calls and `tokens_per_minute` tokens in any `window`, `workers` calls at once. A
    call's tokens are estimated from prompt and response; where the function returns a mapping with `usage`, a
    number of tokens or a mapping with `total_tokens`, as services answer, that takes the estimate's place.
    Waiting for the budget does not count as running time, and scores from the cache cost nothing.
    """

    name = "rate_limited"
    aliases = ("limited",)
    Config = RateLimitedConfig

    def __init__(self, config: RateLimitedConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self.budget = Budget(
            config.requests_per_minute, config.tokens_per_minute, window=config.window
        )

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        with time.waiting():
            spending = await self.budget.spend(self._estimate(sample))

        def judge(value: object) -> Outcome:
            _correct(spending, value)
            return outcome_from(value, call.name)

        return await self._calls.outcome(call, lambda: call(sample), judge)

    def _estimate(self, sample: Sample) -> float:
        """Tokens of a call on this sample."""
        prompt = sample.prompt.raw
        characters = len(prompt if isinstance(prompt, str) else _text(prompt)) + len(sample.text)
        per_token = self.config.characters_per_token
        return float(self.config.tokens_per_request + characters / per_token)


def _text(prompt: object) -> str:
    return json.dumps(prompt, default=str, ensure_ascii=False)


def _correct(spending: Spending, value: object) -> None:
    """Take the tokens that the call really used, where it tells."""
    usage = value.get("usage") if isinstance(value, Mapping) else None
    if isinstance(usage, Mapping):
        usage = usage.get("total_tokens")
    tokens = finite_float(usage)
    if tokens is not None and tokens >= 0:
        spending.tokens = tokens
