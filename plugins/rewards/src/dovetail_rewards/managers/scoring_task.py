"""ScoringTask: the task of a scoring worker. It runs a reward manager over the run's functions, and limits each sample's time."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from typing import Literal

import attrs

from dovetail.interfaces import (
    CountedTime,
    Failure,
    FailureKind,
    Logger,
    Outcome,
    PluginContext,
    PluginRef,
    RunningTime,
    Sample,
)
from dovetail.plugins import load_plugin_class
from dovetail_rewards.managers.inner import InnerManager
from dovetail_rewards.managers.wire import pack_outcome

TARGET = f"{__name__}:make_task"
"""The entry point that a runtime starts in a worker."""


@attrs.frozen(kw_only=True)
class TaskSetup:
    """The setup from which a worker process constructs its reward manager."""

    files: tuple[PluginRef, ...]
    """Plugin files that must be loaded before their objects can be unpickled."""
    manager: bytes
    """The pickled PluginRef of the reward manager."""
    functions: bytes
    """The run's RewardFunctions, pickled; pickled None if the manager uses none."""
    seed: int


@attrs.frozen(kw_only=True)
class Ask:
    """One request to a worker: to score samples, to answer a ping, or to let its reward manager sleep (release memory)."""

    what: Literal["score", "ping", "sleep"]
    samples: tuple[Sample, ...] = ()
    limit: float | None = None
    """Seconds that the scoring of one sample may take; None for no limit."""


def make_task(given: bytes, logger: Logger) -> ScoringTask:
    """Construct a worker's task from a pickled TaskSetup, which must come from the run's own controller."""
    setup: TaskSetup = pickle.loads(given)  # noqa: S301
    for ref in setup.files:
        load_plugin_class(ref)
    context = PluginContext(
        seed=setup.seed,
        role="reward",
        reward_functions=pickle.loads(setup.functions),  # noqa: S301
        logger=logger,
    )
    manager: PluginRef = pickle.loads(setup.manager)  # noqa: S301
    return ScoringTask(InnerManager.open(manager, context, "reward.manager.manager", "remote"))


class ScoringTask:
    """Scores batches of samples in a worker process, with a time limit for each sample."""

    def __init__(self, inner: InnerManager) -> None:
        self._inner = inner

    async def call(self, payload: bytes) -> bytes:
        """Answer one request, and return the scores or failures of its samples; none for a ping or a request to sleep.

        Args:
            payload: a pickled `Ask`.

        Returns:
            The result of `packed`.
        """
        ask: Ask = pickle.loads(payload)  # noqa: S301 - from the run's own controller
        if ask.what == "sleep":
            await asyncio.to_thread(self._inner.manager.sleep)
        outcomes = await asyncio.gather(*(self._score(s, ask.limit) for s in ask.samples))
        return packed(outcomes)

    def close(self) -> None:
        """Close the worker's reward manager."""
        self._inner.manager.close()

    async def _score(self, sample: Sample, seconds: float | None) -> Outcome:
        if seconds is None:
            return await self._inner.score(sample, RunningTime())
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                outcome = await self._inner.score(sample, CountedTime(seconds, limit))
        except TimeoutError:
            return _late(seconds)
        return _late(seconds) if limit.expired() else outcome


def packed(outcomes: Sequence[Outcome]) -> bytes:
    """Return scores and failures as a JSON list, in which each is the text that `pack_outcome` returns."""
    return json.dumps([pack_outcome(outcome) for outcome in outcomes]).encode()


def _late(seconds: float) -> Failure:
    message = f"the worker's reward manager returned no score within {seconds:g} s"
    return Failure(kind=FailureKind.TIMEOUT, message=message, retryable=True)
