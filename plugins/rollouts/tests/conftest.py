"""A rollout service over a scripted engine that waits, dies and leaves when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RolloutError, StopRequested
from dovetail.interfaces import (
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    SamplingParams,
    Score,
)
from dovetail.rollouts.group import Group
from dovetail.rollouts.rollout_pool import RolloutPool
from dovetail.rollouts.rollout_service import RolloutService
from dovetail.scoring.scorer import Scorer
from dovetail.sections import PluginSection
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

LONG = 60.0
"""Seconds in which everything ends that does not hang."""


class Manager(RewardManager):
    """Scores the length of a response, some time after it came.

    Attributes:
        slept: how many samples or groups were being scored each time that it was put to sleep.
    """

    name = "lengths"
    api = ">=1.0,<2"

    def __init__(self) -> None:
        super().__init__(PluginSection(name="lengths"), PluginContext())
        self.seconds = 0.0
        self.running = 0
        self.slept: list[int] = []

    async def score(self, samples: Any, time: Any) -> list[Any]:
        self.running += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return [Score(value=float(sample.response_length)) for sample in samples]

    def sleep(self) -> None:
        self.slept.append(self.running)


class Engine(ScriptedRollout):
    """A scripted replica whose requests wait where a test says so, and which can leave or die.

    Attributes:
        held: prompts whose requests wait; take one out to let them go on.
        turns: the event loop's turn in which each request came.
        active: requests that are under way.
        leaves: the prompt whose request raises SystemExit.
        dead: whether every request fails, and the replica says so.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: set[int] = set()
        self.turns: list[int] = []
        self.turn = 0
        self.active = 0
        self.leaves: int | None = None
        self.dead = False

    def alive(self) -> bool:
        return not self.dead

    async def submit(self, request: RolloutRequest) -> Any:
        self.turns.append(self.turn)
        asyncio.get_running_loop().call_soon(self._next_turn)
        prompt = request.streams[0].prompt
        self.active += 1
        try:
            async for completion in super().submit(request):
                while prompt in self.held and not self.dead:
                    await asyncio.sleep(0.002)
                if self.leaves == prompt:
                    raise SystemExit("the engine left")
                if self.dead:
                    raise RolloutError("it died")
                yield completion
        finally:
            self.active -= 1

    def _next_turn(self) -> None:
        self.turn += 1


def group_of(prompt: int, n: int = 2, **options: Any) -> Group:
    made = Prompt(index=prompt, prompt_ids=np.arange(3), raw=str(prompt))
    return Group(prompt=made, n=n, sampling=SamplingParams(max_new_tokens=6), **options)


def groups_of(*prompts: int) -> list[Group]:
    return [group_of(prompt) for prompt in prompts]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


class Served:
    """A service over one replica.

    Attributes:
        stops: whether a stop is asked for.
    """

    def __init__(
        self, engine: Any, *, partial: bool, continues: bool, service: Any, **options: Any
    ) -> None:
        self.engine, self.manager, self.stops = engine, Manager(), False
        self.pool = RolloutPool([engine], **options)
        self.scorer = Scorer(self.manager, timeout=LONG)
        self.service = RolloutService(
            pool=self.pool,
            scorer=self.scorer,
            manager=self.manager,
            tokenizer=SimpleNamespace(decode=lambda ids, **_: str(ids)),
            seed=1,
            partial=partial,
            continues=continues,
            check_stop=self.check_stop,
            **service,
        )

    def check_stop(self) -> None:
        if self.stops:
            raise StopRequested("stopped")

    def asked(self) -> list[int]:
        """The prompts of all requests so far."""
        return [request.streams[0].prompt for request in self.engine.requests]

    group_of = staticmethod(group_of)
    groups_of = staticmethod(groups_of)
    until = staticmethod(until)

    @staticmethod
    def complete(*groups: Group) -> bool:
        """Whether these groups have all their samples."""
        return all(group.finished and len(group.samples) == group.n for group in groups)

    def quiet(self) -> bool:
        """Whether neither a request nor a reward runs."""
        return not (self.engine.active or self.manager.running)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that makes a `Served`, of a script, the service's further arguments and the pool's options."""
    with ExitStack() as made:

        def one(
            *,
            engine: Any = Engine,
            script: Script | None = None,
            held: Sequence[int] = (),
            partial: bool = False,
            continues: bool = False,
            service: Mapping[str, Any] = MappingProxyType({}),
            **options: Any,
        ) -> Served:
            engine = engine.following(script or Script())
            engine.held.update(held)
            served = Served(
                engine, partial=partial, continues=continues, service=service, **options
            )
            made.callback(served.service.close)
            made.callback(engine.held.clear)
            return served

        yield one
