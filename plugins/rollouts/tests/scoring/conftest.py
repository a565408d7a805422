"""A scripted reward manager, and an event loop with a simulated clock, so that tests of time-outs need no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from dovetail.interfaces import (
    Failure,
    FailureKind,
    PluginContext,
    RewardManager,
    RunningTime,
    Sample,
    Score,
)
from dovetail.sections import PluginSection
from dovetail_rollouts import Scorer
from dovetail_sdk.testing import make_sample


class ScriptedManager(RewardManager):
    """A manager whose answer is a function of the samples, the number of calls so far, and the running time."""

    name = "scripted"
    api = ">=1.0,<2"

    def __init__(self, answer: Any, *, unit: str = "sample", capacity: int | None = None) -> None:
        super().__init__(PluginSection(name="scripted"), PluginContext())
        self.answer = answer
        self.unit = unit
        self.limit = capacity
        self.calls: list[Sequence[Sample]] = []
        self.running = 0
        self.most = 0

    @property
    def capacity(self) -> int | None:
        return self.limit

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> Any:
        self.calls.append(samples)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            answer = self.answer(samples, len(self.calls), time)
            return await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.running -= 1


class Scripted:
    """Helpers of the scorer's tests."""

    Manager = ScriptedManager

    took = 0.0
    """Seconds of the last `run`, on the loop's clock."""

    def ones(self, samples: Sequence[Sample], *_: Any) -> list[Any]:
        """Answer with the score 1 for every sample."""
        return [Score(value=1.0) for _ in samples]

    def sample(self, name: str, **fields: Any) -> Sample:
        return make_sample(name, **fields)

    def failure(self, retryable: bool) -> Failure:
        return Failure(kind=FailureKind.UNREACHABLE, message="no judge", retryable=retryable)

    async def hang(self) -> Any:
        """Never answer."""
        await asyncio.Event().wait()

    def until_done(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run on an event loop whose clock jumps to the next timer, so that a busy machine fails no test."""
        with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
            return runner.run(main)

    def run(
        self, manager: ScriptedManager, names: list[str], *, group_size: int = 1, **options: Any
    ) -> Any:
        """Score samples, and return the outcomes and the scorer; samples `a0` and `a1` are of the group `a`."""

        async def main() -> Any:
            scorer = Scorer(manager, **{"timeout": 5.0, "backoff": 0.001, **options})
            for name in names:
                scorer.add(self.sample(name), group=name[0], group_size=group_size)
            outcomes = await scorer.finish()
            self.took = asyncio.get_running_loop().time()
            return outcomes, scorer

        return self.until_done(main())


class _JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for timers: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: _JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(0)
        if not found:
            self._loop.jump(timeout)
        return found


@pytest.fixture(scope="session")
def scripted() -> Scripted:
    return Scripted()
