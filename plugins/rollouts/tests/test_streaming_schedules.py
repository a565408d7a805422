"""The trainer `streaming` under random schedules on a simulated clock: the bound holds, each prompt is used once, nothing hangs.

Run, collector, rollout service, pool, scorer, ledger and checkpoints are the real ones. The clock of their event loop jumps to the next
timer while the trainer waits for the loop, and stands still otherwise. So latencies of seconds take no time, and a schedule always runs
in the same way.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from simulated_clock import simulate_clock

from dovetail.batch import Batch
from dovetail.errors import DovetailError, RolloutError, StopRequested, WeightSyncError
from dovetail.interfaces import (
    AgentLoop,
    Completion,
    Failure,
    FailureKind,
    FinishReason,
    Groups,
    PluginContext,
    RolloutRequest,
    SampleFilter,
    Session,
)
from dovetail.sections import EpisodeSection, PluginSection
from dovetail_trainers.config import StreamingConfig
from dovetail_trainers.streaming import StreamingTrainer

BATCH, PROMPTS, STEPS, WATCHDOG = 2, 6, 9, 120.0
HANGS = 100.0
"""Seconds after which an engine fails a hanging request; a score that takes as long times out before."""


@attrs.frozen(kw_only=True)
class Schedule:
    """The parameters of a random schedule.

    Attributes:
        seed: the seed of latencies, lengths, failures and ends.
        max_staleness, sync_every, on_sync, save_every: settings of the trainer.
        token: maximum seconds of a token.
        learn: maximum seconds of a stage.
        fails: share of the samples that can't be scored.
        drops: whether a filter drops every sixth group, so that other groups take its place.
        ends: share of the steps in which the process is stopped or killed.
        replicas: number of replicas at the beginning.
        dies_after: mean number of tokens that a replica makes before it dies; 0 if none dies.
        breaks: share of requests, scores and weight updates of a replica that fail, or hang until a time-out.
        moves: share of the steps before which a replica joins or is drained.
        turns: whether samples are episodes of several turns.
        spare: how far the outstanding prompts are below the limit of staleness, from 0 to 1. At 0 steps take prompts in order; at 1
            as few prompts are outstanding as the steps between two publications take.
        tightens: whether each further process of the run has half the `max_staleness`.
    """

    seed: int
    max_staleness: int
    sync_every: int
    on_sync: str
    save_every: int
    token: float
    learn: float
    fails: float
    drops: bool
    ends: float
    replicas: int = 1
    dies_after: float = 0.0
    breaks: float = 0.0
    moves: float = 0.0
    turns: bool = False
    spare: float = 0.0
    tightens: bool = False

    @property
    def over_sampling(self) -> float | None:
        """The trainer's setting `over_sampling`."""
        fewest, most = self.sync_every, (self.max_staleness + 1) * self.sync_every
        return most - self.spare * (most - fewest) if self.spare and most > fewest else None


SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 4),
    sync_every=st.integers(1, 3),
    on_sync=st.sampled_from(["drain", "abort", "keep"]),
    save_every=st.integers(0, 3),
    token=st.sampled_from([0.0, 0.01, 1.0]),
    learn=st.sampled_from([0.0, 0.1, 10.0]),
    fails=st.sampled_from([0.0, 0.1]),
    drops=st.booleans(),
    ends=st.sampled_from([0.0, 0.2]),
    replicas=st.integers(1, 3),
    dies_after=st.sampled_from([0.0, 10.0, 60.0]),
    breaks=st.sampled_from([0.0, 0.05]),
    moves=st.sampled_from([0.0, 0.5]),
    turns=st.booleans(),
    spare=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    tightens=st.booleans(),
)


class DropFirst(SampleFilter):
    """Drops the group of each epoch's first prompt."""

    name = "first"
    api = ">=1.0,<2"
    action = "drop"

    def __init__(self) -> None:
        super().__init__(PluginSection(name="first"), PluginContext())

    def keep(self, columns: Batch, groups: Groups) -> np.ndarray:
        return columns["prompt_id"] != 0


class Talk(AgentLoop):
    """An agent loop of one to three turns, each followed by an observation after some time."""

    name = "talk"
    api = ">=1.0,<2"
    Config = EpisodeSection

    def __init__(self, seconds: float) -> None:
        super().__init__(EpisodeSection(max_seconds=None), PluginContext())
        self.seconds = seconds

    async def run(self, session: Session) -> None:
        for _ in range(Random(session.sample_id).randrange(1, 4)):
            await session.generate(max_new_tokens=2)
            await asyncio.sleep(self.seconds)
            await session.observe("a")


class Watched:
    """The run that the trainer gets; checks the state at each call, after which the process may end."""

    def __init__(self, life: Life) -> None:
        self.life, self.run, self.world = life, life.run, life.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    def admit(self, groups: int | None = None) -> None:
        before = self.life.made.ledger.open()
        self.run.admit(groups)
        if (after := self.life.made.ledger.open()) != before:
            self.world.check_outstanding(after, self.run.position.step)

    def collect(self, step: Any) -> None:
        self.life.move_replicas()
        self.run.collect(step)
        version = self.run.position.weight_version
        self.world.check_ages(step.number, step.collected.samples, version)
        self.life.end()

    def learn(self, step: Any) -> None:
        self.run.learn(step)
        keys = dict.fromkeys(sample.prompt.key[:2] for sample in step.collected.kept)
        self.world.learned[step.number] = list(keys)
        self.life.end()

    def publish_weights(self) -> None:
        self.life.publishing = True
        try:
            self.run.publish_weights()
        finally:
            self.life.publishing = False
        self.life.end()


class Killed(BaseException):
    """The process was killed, and nothing that it does afterwards counts."""


class Life:
    """One process of a run, from its start or a checkpoint to its end."""

    def __init__(self, world: World, directory: Path, checkpoint: Path | None) -> None:
        self.world, self.plan = world, world.plan
        self.chance = Random(world.chance.random())
        self.directory = directory
        self.kept: list[Path] | None = None
        self.publishing = False
        self.made = world.compose(
            f"trainer.total_steps={STEPS}",
            f"rollout.partial_rollout={str(self.plan.on_sync != 'drain').lower()}",
            f"rollout.keep_cache={str(self.plan.on_sync == 'keep').lower()}",
            "reward.max_failure_share=1.0",
            "algorithm.max_generation_rounds=5",  # a step may take the first prompts of several epochs, which the filter drops
            directory=str(directory),
            trainer=world.trainer,
            filters={"first": DropFirst()} if self.plan.drops else {},
            replicas=self.plan.replicas,
            restart=self._restart,
            agent_loop=Talk(self.plan.token) if self.plan.turns else None,
        )
        self.run: Any = self.made.run
        self._script()
        if checkpoint is not None:
            self.run.restore(checkpoint)

    def _script(self) -> None:
        """Add latencies, failures and checks to engines and reward manager."""
        made, chance = self.made, self.chance
        for engine in made.engines:
            self._script_replica(engine)
        score = made.manager.score

        async def scored(samples: Any, time: Any) -> list[Any]:
            # The first sample of a group never fails, since a step without any score would end the run.
            may_fail = not any(sample.sample_id.endswith(".s0") for sample in samples)
            hangs = may_fail and chance.random() < self.plan.breaks
            await asyncio.sleep(HANGS if hangs else chance.uniform(0, self.plan.token))
            failure = Failure(kind=FailureKind.EXCEPTION, message="no")
            fails = [may_fail and chance.random() < self.plan.fails for _ in samples]
            found = await score(samples, time)
            return [failure if fail else one for fail, one in zip(fails, found, strict=True)]

        made.manager.score = scored
        made.events.after = lambda _: self._wait(chance.uniform(0, self.plan.learn))

    def _script_replica(self, engine: Any) -> Any:
        """Make a replica slow, and let it fail and die."""
        chance, run = self.chance, self.run
        tokens_left = chance.expovariate(1 / self.plan.dies_after) if self.plan.dies_after else 1e9
        receive = engine.receive_weights

        def check_alive() -> None:
            if tokens_left <= 0:
                raise RolloutError("it has died")

        async def submit(request: RolloutRequest) -> AsyncGenerator[Completion, None]:
            nonlocal tokens_left
            name = request.request_id
            engine.aborted = [aborted for aborted in engine.aborted if aborted != name]
            # The replica has the current weights, no matter how it came into the pool.
            assert engine.version >= run.position.weight_version
            engine._running.add(name)
            speed = chance.uniform(0, self.plan.token)
            fails = chance.random() < self.plan.breaks
            hangs = chance.random() < self.plan.breaks
            try:
                for sample in range(request.n):
                    versions: list[int] = []
                    wanted = 1 + request.streams[sample].key()[0] % request.sampling.max_new_tokens
                    while len(versions) < wanted and name not in engine.aborted:
                        await asyncio.sleep(HANGS if hangs else speed)
                        await engine._goes_on.wait()
                        tokens_left -= 1
                        check_alive()
                        if hangs or fails:
                            raise RolloutError("the request failed")
                        versions.append(engine.version)
                    whole = len(versions) == wanted
                    yield Completion(
                        request_id=name,
                        sample=sample,
                        response_ids=np.ones(len(versions), np.int64),
                        finish_reason=FinishReason.STOP if whole else FinishReason.ABORT,
                        weight_versions=np.array(versions, np.int64),
                    )
            finally:
                engine._running.discard(name)

        def receive_weights(version: int, manifest: Any) -> None:
            check_alive()
            if chance.random() < self.plan.breaks:
                raise WeightSyncError("it did not take them")
            receive(version, manifest)
            step = run._current
            learned = step is not None and step.counted
            at = step.number if learned else run.position.step
            self.world.published(version, at, scheduled=self.publishing)

        engine.submit, engine.receive_weights = submit, receive_weights
        engine.alive = lambda: tokens_left > 0
        return engine

    def _restart(self, engine: Any) -> Any:
        return self._script_replica(type(engine)())

    def move_replicas(self) -> None:
        """Let a replica join, or drain one unless it is the last."""
        if self.chance.random() >= self.plan.moves:
            return
        pool, service = self.made.pool, self.run.source._service
        staying = [m for m in pool.replicas.members if not (m.draining or m.joining)]
        if self.chance.random() < 0.5 and len(staying) > 1:
            drain = service.drain(self.chance.choice(staying))
            asyncio.run_coroutine_threadsafe(drain, service._loop._loop)
        elif len(pool.replicas.members) < 4:
            pool.replicas.add(lambda _: self._restart(self.made.engine), "http://added")

    def _wait(self, seconds: float) -> None:
        """Let simulated time pass while the trainer is busy."""
        self.run.source._service._loop.wait(asyncio.sleep(seconds))

    def end(self) -> None:
        if self.chance.random() >= self.plan.ends / 3:
            return
        if self.chance.random() < 0.5:
            raise StopRequested("a stop")
        self.kept = self.checkpoints()
        raise Killed

    def checkpoints(self) -> list[Path]:
        return sorted((self.directory / "run" / "checkpoints").glob("step_*"))

    def live(self) -> None:
        """Train until the run is complete or the process ends; in the latter case, set `kept` to the process's checkpoints."""
        try:
            with self.made.run.record.running():
                self.run.trainer.run(Watched(self))
        except StopRequested:
            self.kept = self.checkpoints()
        except Killed:
            pass
        except DovetailError:
            if not (self.plan.breaks or self.plan.dies_after):
                raise
            self.kept = self.checkpoints()
        finally:
            self.made.close()


class World:
    """The successive processes of a run, and checks over all of them."""

    def __init__(self, plan: Schedule, compose: Callable[..., Any], directory: Path) -> None:
        self.compose, self.directory = compose, directory
        self.chance = Random(plan.seed)
        self.follow(plan)
        self.learned: dict[int, list[tuple[int, int]]] = {}
        self.steps_at: dict[int, int] = {}
        self.unscheduled = 0
        """Number of publications outside the schedule: by resumed runs, and after the loss of all replicas."""

    def follow(self, plan: Schedule) -> None:
        """Use this plan for further processes."""
        self.plan = plan
        config = StreamingConfig(
            name="streaming",
            max_staleness=plan.max_staleness,
            sync_every=plan.sync_every,
            on_sync=plan.on_sync,  # type: ignore[arg-type]
            save_every=plan.save_every,
            over_sampling=plan.over_sampling,
        )

        class Configured(StreamingTrainer):
            def __init__(self, _: Any, context: Any) -> None:
                super().__init__(config, context)

        self.trainer = Configured
        self.steps_behind = (plan.max_staleness + 1) * plan.sync_every - 1

    def published(self, version: int, step: int, *, scheduled: bool) -> None:
        """Record the number of steps after which a version was published, and check that it never changes."""
        if version not in self.steps_at:
            self.steps_at[version] = step
            self.unscheduled += not scheduled
        assert self.steps_at[version] == step

    def check_ages(self, number: int, samples: Any, version: int) -> None:
        sequences = [s.completion for s in samples]
        made_by = {int(v) for c in sequences for v in c.weight_versions[c.produced_T]}
        behind = number - 1 - min(self.steps_at[v] for v in made_by)
        assert 0 <= behind <= self.steps_behind
        extra = self.unscheduled if self.plan.sync_every > 1 else 0
        assert version - min(made_by) <= self.plan.max_staleness + extra

    def check_outstanding(self, in_flight: Any, step: int) -> None:
        """Check the number of prompts in flight or used since the last publication. Called only after prompts were queued.

        Otherwise more may be in flight: a stopped step that had replaced dropped groups returns all groups that it had taken.
        """
        unpublished = step - max(self.steps_at.values())
        steps = self.plan.over_sampling or self.steps_behind + 1
        limit = round(steps * BATCH)
        assert len(in_flight) + unpublished * BATCH <= limit

    def run(self) -> Any:
        life, lives = Life(self, self.directory / "0", None), 0
        while True:
            life.live()
            if life.kept is None:
                return life.made
            self.unscheduled += 1
            lives += 1
            if lives == 5:  # so that the run ends
                self.plan = attrs.evolve(self.plan, ends=0.0, dies_after=0.0, breaks=0.0)
            if self.plan.tightens:
                self.follow(attrs.evolve(self.plan, max_staleness=self.plan.max_staleness // 2))
            checkpoint = max(life.kept, key=lambda path: int(path.name[5:]), default=None)
            step = 0 if checkpoint is None else int(checkpoint.name[5:])
            self.learned = {n: keys for n, keys in self.learned.items() if n <= step}
            self.steps_at = {v: at for v, at in self.steps_at.items() if at <= step}
            life = Life(self, self.directory / str(lives), checkpoint)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, compose: Any) -> None:
    """Give event loops a simulated clock, and read and plan each config only once."""
    simulate_clock(monkeypatch)
    monkeypatch.setattr("os.fsync", lambda _: None)
    composing = compose.__globals__
    read, plan = composing["config_from_mapping"], composing["make_plan"]
    configs: dict[tuple[str, ...], Any] = {}
    plans: dict[int, Any] = {}

    def read_once(mapping: Any, overrides: Any) -> Any:
        if overrides not in configs:
            configs[overrides] = read(mapping, overrides)
        return configs[overrides]

    def plan_once(config: Any, **counts: Any) -> Any:
        if id(config) not in plans:
            plans[id(config)] = plan(config, **counts)
        return plans[id(config)]

    monkeypatch.setitem(composing, "config_from_mapping", read_once)
    monkeypatch.setitem(composing, "make_plan", plan_once)


def follow(plan: Schedule, compose: Callable[..., Any]) -> None:
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)
    try:
        with TemporaryDirectory() as directory:
            world = World(plan, compose, Path(directory))
            made = world.run()
            used = Counter(key for keys in world.learned.values() for key in keys)
            assert sorted(world.learned) == list(range(1, STEPS + 1))
            assert used.total() == STEPS * BATCH
            kept = [p for p in range(PROMPTS) if p or not plan.drops]
            order = [(epoch, prompt) for epoch in range(STEPS) for prompt in kept]
            assert used == Counter(order[: STEPS * BATCH])
            made.ledger.check()
            counts = made.ledger.counts()
            assert counts["used"] == STEPS * BATCH
            epochs = max(epoch for epoch, _ in used) + 1
            assert counts["dropped"] == ({"filter:first": epochs} if plan.drops else {})
    finally:
        faulthandler.cancel_dump_traceback_later()


STEADY = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(plan=SCHEDULES)
@example(
    plan=Schedule(
        seed=84700,
        max_staleness=0,
        sync_every=1,
        on_sync="drain",
        save_every=0,
        token=0.0,
        learn=0.0,
        fails=0.0,
        drops=True,
        ends=0.2,
    )
)  # stops a step that has replaced a dropped group
@example(
    plan=Schedule(
        seed=1,
        max_staleness=4,
        sync_every=1,
        on_sync="abort",
        save_every=1,
        token=0.01,
        learn=0.1,
        fails=0.0,
        drops=False,
        ends=0.2,
        tightens=True,
    )
)  # groups of a checkpoint are too old for the next process
@STEADY
def test_the_bound_holds_and_each_prompt_is_used_once_whatever_the_schedule(
    simulated: None, compose: Callable[..., Any], plan: Schedule
) -> None:
    follow(plan, compose)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@given(plan=SCHEDULES)
@settings(STEADY, max_examples=1000)
def test_the_bound_holds_under_many_schedules(
    simulated: None, compose: Callable[..., Any], plan: Schedule
) -> None:
    follow(plan, compose)
