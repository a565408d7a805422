"""Fixtures of the reward tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dovetail.interfaces import Outcome, PluginContext, RewardManager, RunningTime, Sample, Score
from dovetail_rewards.manager_config import NaiveConfig
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_rollouts import RewardFunctions, Scorer
from dovetail_sdk.testing import make_sample, release_hung


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Makes started managers of a class and a config around one function, or around functions by source."""
    made: list[RewardManager] = []

    def make(cls: Any, config: Any, function: Any = None) -> RewardManager:
        by_source = function if isinstance(function, dict) else None
        functions = RewardFunctions(by_source, None if by_source is not None else function)
        made.append(cls(config, PluginContext(reward_functions=functions)))
        made[-1].start()
        return made[-1]

    yield make
    release_hung()
    for one in made:
        one.close()


@pytest.fixture
def manager(started: Callable[..., Any]) -> Callable[..., NaiveManager]:
    """Makes started naive managers."""
    return lambda function=None, **config: started(NaiveManager, NaiveConfig(**config), function)


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """Makes samples."""

    def make(name: str = "s0", text: str = "4", **fields: Any) -> Sample:
        defaults: dict[str, Any] = {"prompt": "2 + 2 =", "ground_truth": "4"}
        return make_sample(name, text, **{**defaults, **fields})

    return make


class Clock:
    """The seconds by which the clock of `run`'s event loop is ahead. A test sets it ahead to make time limits expire,
    independently of the machine's load.
    """

    ahead = 0.0


@pytest.fixture
def clock() -> Clock:
    """The clock of `run`."""
    return Clock()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of a Clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._by = clock

    def time(self) -> float:
        return super().time() + self._by.ahead


class Watched(RunningTime):
    """A RunningTime that shows whether time is currently counted."""

    counts = True

    def stop(self) -> None:
        self.counts = False

    def go_on(self) -> None:
        self.counts = True


@pytest.fixture
def watched() -> type[Watched]:
    """The class of a RunningTime that shows whether time is currently counted."""
    return Watched


class _Waiting(RunningTime):
    """A RunningTime that adds up the seconds marked as waiting."""

    seconds = 0.0

    def stop(self) -> None:
        self._since = time.monotonic()

    def go_on(self) -> None:
        self.seconds += time.monotonic() - self._since


@pytest.fixture
def waited() -> Callable[..., float]:
    """Scores samples in one call, checks that all get scores, and returns the seconds marked as waiting."""

    def score(manager: RewardManager, samples: Sequence[Sample]) -> float:
        time = _Waiting(0.1)
        outcomes = asyncio.run(manager.score(samples, time))
        assert all(isinstance(outcome, Score) for outcome in outcomes)
        return time.seconds

    return score


@pytest.fixture
def run(clock: Clock) -> Callable[..., dict[str, Outcome]]:
    """Scores samples with a manager, through the Scorer; `groups` are the numbers of samples in each group.

    `hang` is the number of samples that never get an answer. Their time limit expires as soon as all other samples have
    an outcome, without waiting.
    """

    def score(
        manager: RewardManager,
        samples: Sequence[Sample],
        *,
        groups: Sequence[int] | None = None,
        hang: int = 0,
        **limits: Any,
    ) -> dict[str, Outcome]:
        sizes = groups or [1] * len(samples)
        named = [(group, size) for group, size in enumerate(sizes) for _ in range(size)]

        async def main() -> dict[str, Outcome]:
            scorer = Scorer(manager, **{"timeout": 30.0, **limits})
            for sample, (group, size) in zip(samples, named, strict=True):
                scorer.add(sample, group=group, group_size=size)
            finishing = asyncio.ensure_future(scorer.finish())
            while not finishing.done():  # wake the loop, so that it checks its clock
                await asyncio.wait({finishing}, timeout=0.01)
                if hang and sum(not task.done() for task in scorer._tasks.values()) <= hang:
                    clock.ahead += scorer._timeout
            return await finishing

        with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
            return runner.run(main())

    return score
