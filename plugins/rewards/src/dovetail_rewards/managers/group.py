"""The reward manager `group`: scores whole groups, for functions whose scores depend on the other responses to a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import combinations

import numpy as np

from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    RunningTime,
    Sample,
    Score,
)
from dovetail_rewards.manager_config import GroupConfig
from dovetail_rewards.managers.function_manager import (
    FunctionManager,
    InProcessCalls,
    function_of,
)
from dovetail_rewards.managers.places import Places
from dovetail_rollouts import RewardCall, outcomes_from


class GroupManager(FunctionManager):
    """Scores a prompt's responses together, when the last response is generated.

    A function on lists is called once for the group. A function on pairs, `compare(prompt, solution_a, solution_b, …)`, returns the
    preference p(a, b) for the first response, from 0 to 1. The score of response i of n is its mean preference over the other responses:

    score_i = 1/(n − 1) Σ_{j≠i} p_ij

    With `both_orders`, p_ij = ½ (p(i, j) + 1 − p(j, i)). Otherwise only p(i, j) with i < j is computed: p_ij = p(i, j), p_ji = 1 − p_ij.

    A failed comparison fails both of its samples; a group of one sample fails. A function on single samples is called for each sample.
    `reward.timeout` holds for a group.
    """

    name = "group"
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "async_functions"})
    unit = "group"
    queues = True
    Config = GroupConfig

    def __init__(self, config: GroupConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._calls = InProcessCalls(config.max_hung)
        self._places = Places(config.workers)

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        calls = [
            function_of(self.context.reward_functions, sample.prompt.data_source)
            for sample in samples
        ]
        missing = next((call for call in calls if isinstance(call, Failure)), None)
        if missing is not None:
            return [missing] * len(calls)
        call = calls[0]
        if isinstance(call, Failure) or any(other is not call for other in calls):
            message = "the group can't be scored: its samples have different data sources, which select different reward functions"
            return [Failure(kind=FailureKind.EXCEPTION, message=message)] * len(calls)
        async with self._places.one(time):
            return await self._score_group(call, samples, time)

    async def _score_group(
        self, call: RewardCall, samples: Sequence[Sample], time: RunningTime
    ) -> list[Outcome]:
        if call.form == "pair":
            return await self._compare(call, samples)
        if call.form == "list":
            value = await self._calls.value(call, partial(call.on_list, samples))
            if isinstance(value, Failure):
                return [value] * len(samples)
            return outcomes_from(value, len(samples), call.name)
        return list(await asyncio.gather(*(self._cached(call, s, time) for s in samples)))

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        return await self._calls.outcome(call, partial(call, sample))

    async def _compare(self, call: RewardCall, samples: Sequence[Sample]) -> list[Outcome]:
        count = len(samples)
        if count == 1:
            message = f"reward function {call.name} compares responses, but the group has only one; set rollout.n=2 or more"
            return [Failure(kind=FailureKind.INVALID_VALUE, message=message)]
        orders = list(combinations(range(count), 2))
        if self.config.both_orders:
            orders += [(j, i) for i, j in orders]
        answers = await asyncio.gather(
            *(self._preference(call, samples[i], samples[j]) for i, j in orders)
        )
        wins_N, rounds = np.zeros(count), len(orders) / (count * (count - 1) / 2)
        failures: dict[int, Failure] = {}
        for (i, j), answer in zip(orders, answers, strict=True):
            if isinstance(answer, Failure):
                failures.setdefault(i, answer)
                failures.setdefault(j, answer)
                continue
            wins_N[i] += answer
            wins_N[j] += 1.0 - answer
        scores_N = wins_N / (rounds * (count - 1))
        return [
            failures[i] if i in failures else Score(value=float(score))
            for i, score in enumerate(scores_N)
        ]

    async def _preference(self, call: RewardCall, first: Sample, second: Sample) -> float | Failure:
        """Return the preference for the first sample over the second, from 0 to 1."""
        outcome = await self._calls.outcome(call, partial(call.on_pair, first, second))
        if isinstance(outcome, Failure):
            return outcome
        if not 0.0 <= outcome.value <= 1.0:
            message = f"reward function {call.name} returned {outcome.value:g}; expected a value from 0 (the second response is better) to 1 (the first is)"
            return Failure(kind=FailureKind.INVALID_VALUE, message=message)
        return outcome.value

    def close(self) -> None:
        self._calls.close()
