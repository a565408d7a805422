"""Predictions of a run's step seconds, against runs of the real scheduler on a simulated clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings, strategies as st
from simulated_clock import simulate_clock

from dovetail.hooks import hookimpl
from dovetail.interfaces import Completion, FinishReason, RolloutRequest
from dovetail.sections.placement import Pool
from dovetail_rollouts.measured_run import Forecast, Measured, forecast
from dovetail_rollouts.schedule_simulation import Prediction
from dovetail_trainers.config import StreamingConfig
from dovetail_trainers.streaming import StreamingTrainer

LONGEST = 120


@attrs.frozen(kw_only=True)
class World:
    """The response lengths and the times of a simulated run, in seconds.

    Attributes:
        seed: the seed of lengths and of the trainer's times.
        median, sigma: parameters of the lengths, which are log-normal.
        fixed, each: time of a decode step: a fixed part, and a part for each running sample.
        learning: time of training on a token.
        publication: time of one publication of weights.
    """

    seed: int
    median: float
    sigma: float
    fixed: float
    each: float
    learning: float
    publication: float


@attrs.frozen(kw_only=True)
class Way:
    """The schedule of a run, and its number of replicas."""

    max_staleness: int = 0
    sync_every: int = 1
    on_sync: str = "drain"
    over_sampling: float | None = None
    replicas: int = 1


class Decoder:
    """A replica that decodes a token of all running samples at once. The lengths repeat every three steps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.left: dict[tuple[str, int], int] = {}
        self.ended: dict[str, asyncio.Queue[int]] = {}
        self.aborted: set[str] = set()
        self.task: asyncio.Task[None] | None = None

    def length(self, stream: Any) -> int:
        chance = np.random.default_rng(
            (self.world.seed, stream.epoch % 2, stream.prompt, stream.sample)
        )
        drawn = chance.lognormal(np.log(self.world.median), self.world.sigma)
        return int(np.clip(drawn, 1, LONGEST))

    async def submit(self, request: RolloutRequest) -> AsyncGenerator[Completion, None]:
        name = request.request_id
        self.aborted.discard(name)
        self.ended[name] = asyncio.Queue()
        wanted = [self.length(stream) - stream.offset for stream in request.streams]
        self.left |= {(name, sample): length for sample, length in enumerate(wanted)}
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self.decode())
        for _ in wanted:
            sample = await self.ended[name].get()
            left = self.left.pop((name, sample))
            made = wanted[sample] - left
            yield Completion(
                request_id=name,
                sample=sample,
                response_ids=np.ones(made, np.int64),
                finish_reason=FinishReason.ABORT if left else FinishReason.STOP,
                weight_versions=np.ones(made, np.int64),
            )

    async def decode(self) -> None:
        while running := [key for key, left in self.left.items() if left]:
            await asyncio.sleep(self.world.fixed + self.world.each * len(running))
            for name, sample in running:
                if name not in self.aborted:
                    self.left[name, sample] -= 1
                    if not self.left[name, sample]:
                        self.ended[name].put_nowait(sample)

    async def abort(self, names: Any) -> None:
        for name in names:
            self.aborted.add(name)
            for key in [key for key, left in self.left.items() if key[0] == name and left]:
                self.ended[name].put_nowait(key[1])


class Metrics:
    """An observer that keeps every step's metrics and lengths."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.lengths: list[list[int]] = []

    @hookimpl
    def step_finished(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))

    @hookimpl
    def rollout_finished(self, samples: Any) -> None:
        self.lengths.append([sample.response_length for sample in samples])


def received(wait: Any, seconds: float, receive: Any, *arguments: Any) -> None:
    wait(seconds)
    receive(*arguments)


def trained(world: World, compose: Callable[..., Any], way: Way, first: int, last: int) -> Measured:
    """Return the measurements of a run's steps `first` to `last` on the simulated clock."""
    chance = Random(world.seed)
    trainer = StreamingConfig(
        name="streaming",
        max_staleness=way.max_staleness,
        sync_every=way.sync_every,
        on_sync=way.on_sync,  # type: ignore[arg-type]
        over_sampling=way.over_sampling,
    )

    class Configured(StreamingTrainer):
        def __init__(self, _: Any, context: Any) -> None:
            super().__init__(trainer, context)

    made = compose(
        f"trainer.total_steps={last + 1 + trainer.steps_behind}",
        "trainer.save_last=false",
        "trainer.name=streaming",
        *(
            f"trainer.{key}={'null' if (value := getattr(trainer, key)) is None else value}"
            for key in ("max_staleness", "sync_every", "on_sync", "over_sampling")
        ),
        "algorithm.rollout_correction=disabled",
        "data.train_batch_size=4",
        f"data.max_response_length={LONGEST}",
        "rollout.n=6",
        directory=uuid4().hex,
        trainer=Configured,
        replicas=way.replicas,
    )
    service, record, metrics = made.run.source._service, made.run.record, Metrics()
    made.observers.add(metrics)

    def clock() -> float:
        return service._loop._loop.time()

    def wait(seconds: float) -> None:
        service._loop.wait(asyncio.sleep(seconds))

    def learn(stage: str) -> None:
        if stage == "update_actor":
            tokens = sum(metrics.lengths[-1]) + 24 * 2
            wait(world.learning * tokens * chance.uniform(0.9, 1.1))

    made.events.after = learn
    record.timers._clock = clock
    for busy in (service._generation.asking, service._generation.working, service._scorer.busy):
        busy._clock = clock
    for engine in made.engines:
        decoder = Decoder(world)
        engine.submit, engine.abort = decoder.submit, decoder.abort
        engine.receive_weights = partial(received, wait, world.publication, engine.receive_weights)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("dovetail.run.record", "dovetail_rollouts.rollout_seconds"):
            patch.setattr(f"{module}.time", SimpleNamespace(monotonic=clock))
        with record.running():
            made.run.trainer.run(made.run)
    pools = tuple(Pool(name=role, roles=(role,)) for role in ("actor", "rollout"))
    placement = attrs.evolve(
        made.plan.placement, pools=pools
    )  # The simulated clock lets both sides work at once.
    return Measured(
        name="simulated",
        plan=attrs.evolve(made.plan, placement=placement),
        steps=metrics.steps[first:last],
        lengths=[length for lengths in metrics.lengths[first:last] for length in lengths],
    )


WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    median=st.sampled_from([10.0, 30.0]),
    sigma=st.sampled_from([0.2, 0.8]),
    fixed=st.sampled_from([0.0, 0.01, 0.1]),
    each=st.sampled_from([0.001, 0.01]),
    learning=st.sampled_from([0.0001, 0.001, 0.01]),
    publication=st.sampled_from([0.0, 1.0]),
)
WAYS = st.builds(
    Way,
    max_staleness=st.integers(0, 2),
    sync_every=st.integers(1, 2),
    on_sync=st.sampled_from(["drain", "abort"]),
)


def follow(
    compose: Callable[..., Any], world: World, way: Way, of: Way | None = None
) -> tuple[Forecast, Prediction]:
    """Return the forecast from one run for the schedule `way`, and the measurements of a run with that schedule."""
    with pytest.MonkeyPatch.context() as patch:
        simulate_clock(patch)
        patch.setattr("os.fsync", lambda _: None)
        measured = trained(world, compose, of or Way(), 3, 12)
        held_out = trained(world, compose, way, 9, 21)
    found = forecast(measured, held_out.plan)
    assert found.own.step_seconds == pytest.approx(found.measured.step_seconds, rel=0.05)
    return found, held_out.mean()


def check(found: Forecast, wanted: Prediction) -> None:
    assert found.low * 0.9 < wanted.step_seconds < found.high * 1.1
    if found.high > found.low * 1.1:
        return  # the measured steps are too similar to estimate the time of a decode step
    assert found.predicted.step_seconds == pytest.approx(wanted.step_seconds, rel=0.1)
    assert found.predicted.trainer_waits == pytest.approx(wanted.trainer_waits, abs=0.1)
    assert found.predicted.rollout_idle == pytest.approx(wanted.rollout_idle, abs=0.1)


STEADY = settings(
    max_examples=1,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SLOW_TRAINER = World(
    seed=2, median=30.0, sigma=0.2, fixed=0.1, each=0.001, learning=0.01, publication=1.0
)
SLOW_ROLLOUT = attrs.evolve(SLOW_TRAINER, sigma=0.8, learning=0.001)


@given(world=WORLDS, way=WAYS)
@example(world=SLOW_TRAINER, way=Way(max_staleness=1, sync_every=2))
@example(world=SLOW_ROLLOUT, way=Way(max_staleness=1, on_sync="abort", replicas=2))
@example(world=SLOW_ROLLOUT, way=Way(max_staleness=2, on_sync="abort", over_sampling=2))
@STEADY
def test_an_on_policy_run_predicts_the_steps_of_another_schedule(
    compose: Callable[..., Any], world: World, way: Way
) -> None:
    check(*follow(compose, world, way))


@pytest.mark.nightly
@given(world=WORLDS, way=WAYS)
@settings(STEADY, max_examples=25)
def test_an_on_policy_run_predicts_the_steps_of_many_schedules(
    compose: Callable[..., Any], world: World, way: Way
) -> None:
    check(*follow(compose, world, way))


def test_the_range_predicted_from_a_run_that_generates_ahead_holds_what_is_measured(
    compose: Callable[..., Any],
) -> None:
    ahead = Way(max_staleness=1, on_sync="abort")
    check(*follow(compose, SLOW_ROLLOUT, Way(), ahead))
