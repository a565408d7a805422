"""The rollout service and the ledger under random schedules: after any failure, return or stop, each prompt ends exactly once."""

from __future__ import annotations

import asyncio
import faulthandler
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import RolloutError, StopRequested
from dovetail.interfaces import (
    Failure,
    FailureKind,
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    SamplingParams,
    Score,
    WeightManifest,
)
from dovetail.sections import PluginSection
from dovetail_datasets.samplers import SequentialSampler
from dovetail_rollouts import Group, RolloutPool, RolloutService, Scorer
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout

PROMPTS, N, WATCHDOG = 7, 2, 120.0


class Engine(ScriptedRollout):
    """A replica that takes random time, and refuses some requests."""

    def __init__(self, chance: Random, refuses: float) -> None:
        super().__init__()
        self.chance, self.refuses = chance, refuses
        self.active = 0

    async def submit(self, request: RolloutRequest) -> Any:
        self.active += 1
        try:
            async with aclosing(super().submit(request)) as completions:
                async for completion in completions:
                    for _ in range(self.chance.randrange(6)):
                        await asyncio.sleep(0)
                    if self.chance.random() < self.refuses:
                        raise RolloutError("refused")
                    yield completion
        finally:
            self.active -= 1


class Manager(RewardManager):
    """A manager that fails to score some samples."""

    name = "random"
    api = ">=1.0,<2"

    def __init__(self, chance: Random, fails: float, unit: str) -> None:
        super().__init__(PluginSection(name="random"), PluginContext())
        self.chance, self.fails, self.unit = chance, fails, unit
        self.running = 0

    async def score(self, samples: Any, time: Any) -> list[Any]:
        self.running += 1
        try:
            for _ in range(self.chance.randrange(6)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        failure = Failure(kind=FailureKind.EXCEPTION, message="no")
        return [failure if self.chance.random() < self.fails else Score(value=1.0) for _ in samples]


class Schedule:
    """A trainer with random actions, and a model of the expected state.

    Attributes:
        expected: the groups, in the order in which they must be taken.
        used: the prompts that were trained on.
    """

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        # Engine and manager run in another thread, so each has its own random generator.
        self.engines = [
            Engine(Random(seed + i), chance.choice([0.0, 0.05, 0.2]))
            for i in range(chance.choice([1, 2]))
        ]
        unit = chance.choice(["sample", "group"])
        self.whole = unit == "group"
        self.manager = Manager(Random(-seed), chance.choice([0.0, 0.3]), unit)
        self.pool = RolloutPool(self.engines, max_failures=1 << 30)
        self.stops = 0.0
        self.service = RolloutService(
            pool=self.pool,
            scorer=Scorer(self.manager, timeout=WATCHDOG),
            manager=self.manager,
            tokenizer=SimpleNamespace(decode=lambda ids, **_: str(ids)),
            seed=seed,
            partial=chance.random() < 0.5,
            continues=chance.random() < 0.5,
            check_stop=self.check_stop,
        )
        self.ledger = Ledger()
        prompts = [Prompt(index=i, prompt_ids=np.arange(2), raw=str(i)) for i in range(PROMPTS)]
        sampler = SequentialSampler(PluginSection(), PluginContext())
        self.loader = PromptLoader(prompts, sampler, 1, self.ledger)
        self.expected: deque[Group] = deque()
        self.used: list[tuple[int, int]] = []
        self.version = self.step = 0

    def check_stop(self) -> None:
        if self.chance.random() < self.stops:
            raise StopRequested("stopped")

    def admit(self) -> None:
        groups = [
            Group(prompt=prompt, n=N, sampling=SamplingParams(max_new_tokens=3))
            for prompt in self.loader.next_batch(self.chance.randint(1, 4))
        ]
        self.service.admit(groups)
        self.expected += groups

    def train(self) -> None:
        """Take a step as the collector does; some steps fail, and return their groups."""
        self.step += 1
        count = self.chance.randint(0, len(self.expected))
        groups: list[Group] = []
        try:
            groups = self.service.take(count)
            assert groups == [self.expected.popleft() for _ in range(count)]
            assert all(group.finished for group in groups)
            self.refill(groups)
            for group in groups:
                self.enter(group)
            if self.chance.random() < 0.2:
                raise ValueError("the step failed")
        except (RolloutError, StopRequested, ValueError):
            self.ledger.give_back(self.step)
            self.service.give_back(groups)
            self.expected.extendleft(reversed(groups))
            return
        assert self.ledger.taken(self.step) == [
            key for key in self.ledger.open() if key in {group.prompt.key for group in groups}
        ]
        for group in groups:
            self.ledger.use(*group.prompt.key)
            self.used.append(group.prompt.key[:2])

    def refill(self, groups: list[Group]) -> None:
        for _ in range(2):
            thinned = [group for group in groups if group.missing() != (0, False)]
            for group in thinned:
                group.try_again(whole=self.whole)
            if thinned:
                self.service.generate(thinned)

    def enter(self, group: Group) -> None:
        epoch, prompt, latest = group.prompt.key
        while (attempt := self.ledger.attempt(epoch, prompt)) < latest:
            self.ledger.retry(epoch, prompt, attempt)
        self.ledger.take(epoch, prompt, latest, step=self.step)
        sound = [sample for sample in group.samples if sample.score is not None]
        names = [sample.sample_id for sample in group.samples]
        assert len(set(names)) == len(names)
        assert len(sound) + group.missing()[0] == N
        assert {sample.prompt.key for sample in sound} <= {group.prompt.key}

    def publish(self) -> None:
        """Check that weights change only while no request runs."""
        with self.service.held(nullcontext):
            assert all(not engine._running for engine in self.engines)
            self.version += 1
            manifest = WeightManifest(version=self.version, tensors=())
            assert not self.pool.replicas.receive_weights(self.version, manifest)
        self.service.settle()

    def save(self) -> None:
        """Check that a checkpoint holds queued groups in their order, and no response both complete and interrupted."""
        for group in (kept := self.service.kept(list)):
            assert not group.arrived.keys() & group.cut.keys()
        assert kept == [group for group in self.expected if group in kept]

    def sleep(self) -> None:
        """Check that replicas and reward models sleep only while nothing runs."""
        self.service.suspend(nullcontext)
        if self.chance.random() < 0.5:
            self.publish()
        if self.chance.random() < 0.5:
            self.save()
        assert all(not engine._running for engine in self.engines)
        assert not self.manager.running
        self.service.resume()

    def stopping(self) -> None:
        """Take a step that a stop may end."""
        self.stops = 0.5
        self.train()
        self.stops = 0.0

    def run(self) -> None:
        actions = [self.admit, self.admit, self.train, self.train, self.publish, self.stopping]
        actions += [self.save, self.sleep]
        for _ in range(self.chance.randint(5, 15)):
            self.chance.choice(actions)()
            assert self.service.outstanding == len(self.expected)
            self.ledger.check(in_flight=True)


@contextmanager
def watchdog() -> Iterator[None]:
    """End the process and print all stacks if a test hangs."""
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_each_group_ends_once_in_the_order_of_admission_and_nothing_runs_after_the_end(
    first: int,
) -> None:
    for seed in range(first, first + 20):
        schedule = Schedule(seed)
        with watchdog():
            schedule.run()
            drains = seed % 2 == 0
            for engine in schedule.engines if drains else ():
                engine.refuses = 0.0
            while drains and schedule.expected:
                schedule.train()
            schedule.service.close()
        threads = {thread.name for thread in threading.enumerate()}
        assert "dovetail-rollout" not in threads
        assert all(engine.active == 0 for engine in schedule.engines)
        assert schedule.manager.running == 0
        assert len(set(schedule.used)) == len(schedule.used)
        # Within a schedule, epochs and their prompts are used in order.
        assert schedule.used == sorted(schedule.used)
        in_flight = [key[:2] for key in schedule.ledger.open()]
        assert sorted(in_flight) == sorted(group.prompt.key[:2] for group in schedule.expected)
        schedule.ledger.check(in_flight=not drains)
