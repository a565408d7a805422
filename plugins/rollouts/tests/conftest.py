"""Fixtures: a rollout service over a scripted engine that waits, dies or leaves on a test's request; replicas that fail or refuse
updates, and a `World` that sends them weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from composed_run import compose

from dovetail.batch import Batch
from dovetail.dispatch import Future
from dovetail.errors import RolloutError, StopRequested, WeightSyncError
from dovetail.interfaces import (
    PluginContext,
    PluginRef,
    Prompt,
    RewardManager,
    RolloutRequest,
    SamplingParams,
    Score,
    WeightManifest,
)
from dovetail.run.actor_weights import ActorWeights
from dovetail.sections import PluginSection, RolloutSection
from dovetail.sections.rollout import WeightCheckSection
from dovetail_rollouts import Group, RolloutPool, RolloutService, Scorer
from dovetail_rollouts.weight_check import WeightCheck
from dovetail_rollouts.weight_sync import WeightSync
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

__all__ = ["compose"]

LONG = 60.0
"""Seconds within which everything ends, unless it hangs."""


class Manager(RewardManager):
    """A manager that scores the length of a response, after `seconds`.

    Attributes:
        slept: the number of samples or groups in scoring at each call of `sleep`.
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
        held: the prompts whose requests wait; a prompt's requests continue once it is removed.
        turns: the turn of the event loop in which each request arrived.
        active: the number of running requests.
        leaves: the prompt whose requests raise SystemExit.
        dead: whether every request fails, and the replica reports that it is not alive.
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
    """A rollout service over one replica.

    Attributes:
        stops: whether a stop is requested.
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
        """The prompt of each request so far."""
        return [request.streams[0].prompt for request in self.engine.requests]

    group_of = staticmethod(group_of)
    groups_of = staticmethod(groups_of)
    until = staticmethod(until)

    @staticmethod
    def complete(*groups: Group) -> bool:
        """Whether these groups have all their samples."""
        return all(group.finished and len(group.samples) == group.n for group in groups)

    def quiet(self) -> bool:
        """Whether no request runs and no sample is being scored."""
        return not (self.engine.active or self.manager.running)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that makes a `Served` from a script, further arguments of the service, and options of the pool."""
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


@pytest.fixture(scope="session")
def mortal() -> Any:
    """The class `Mortal`."""
    return Mortal


@pytest.fixture(scope="session")
def make_world() -> Any:
    """The class `World`."""
    return World


class Mortal(ScriptedRollout):
    """A replica that can die, refuse the next `refuses` updates, and compute log-probabilities that are `off` by a constant."""

    def __init__(self, log: list[str] | None = None, *, refuses: int = 0, off: float = 0.0) -> None:
        super().__init__()
        self.log = log if log is not None else []
        self.refuses, self.off = refuses, off
        self.dead = False
        self.dies_after: int | None = None
        self.manifests: list[WeightManifest] = []

    def alive(self) -> bool:
        return not self.dead

    async def submit(self, request: RolloutRequest) -> Any:
        if self.dead:
            raise RolloutError("it is dead")
        async for completion in super().submit(request):
            if self.dies_after is not None:
                if not self.dies_after:
                    self.dead = True
                    raise RolloutError("it died")
                self.dies_after -= 1
            yield completion

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        if self.dead:
            raise RolloutError("it is dead")
        self.log.append(f"take {version}")
        if self.refuses:
            self.refuses -= 1
            raise WeightSyncError("torn")
        self.manifests.append(manifest)
        super().receive_weights(version, manifest)

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.log.append("score")
        return [np.full(len(ids_L) - 1, -1.0 + self.off, np.float32) for ids_L in sequences]

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        self.log.append(f"sleep{'' if keep_weights else ' and forget'}")
        return super().sleep(tags, keep_weights=keep_weights)

    def wake(self, tags: frozenset[str]) -> None:
        self.log.append(f"wake {'+'.join(sorted(tags))}")
        super().wake(tags)


class Sender:
    """An actor that sends weights, or raises the errors of `raises`; its log-probability of every token is −1."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.raises: list[Exception] = []
        self.meets: threading.Barrier | None = None
        self.waits: threading.Event | None = None
        self.asked: list[Batch] = []

    def weight_manifest(self, version: int) -> Future[WeightManifest]:
        return Future.completed(WeightManifest(version=version, tensors=()))

    def send_weights(self, version: int, manifest: WeightManifest) -> Future[None]:
        self.log.append(f"send {version}")
        if self.meets is not None:
            self.meets.wait(120)
        if self.waits is not None:
            assert self.waits.wait(120)
        if self.raises:
            return Future.failed(self.raises.pop(0))
        return Future.completed(None)

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Future[Batch]:
        self.log.append("forward")
        self.asked.append(batch)
        mask = batch["response_mask"]
        values = mask.with_values(np.full(len(mask.values), -1.0, np.float32))
        return Future.completed(Batch(dict.fromkeys(outputs, values)))


PROMPTS = [Prompt(index=i, prompt_ids=np.arange(i, i + 3), raw=str(i)) for i in range(5)]
"""The training prompts of a `World`'s run."""


class TwoSpecial:
    """A tokenizer with two special tokens."""

    all_special_ids = (0, 7)


class World:
    """A WeightSync over an actor and replicas that only simulate.

    Attributes:
        log: the events, in order; of replicas only if they were given the log.
        metrics: the metrics of the step.
        told: the logged events with their fields.
        made: the replicas that a restart made.
    """

    def __init__(
        self,
        replicas: Sequence[ScriptedRollout],
        *,
        log: list[str] | None = None,
        capabilities: frozenset[str] = frozenset(),
        ends_meet: bool = False,
        weight_check: WeightCheckSection | None = None,
        prompts: Sequence[Prompt] = PROMPTS,
        **rollout: Any,
    ) -> None:
        self.log = log if log is not None else []
        self.metrics: dict[str, float] = {}
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.made: list[Mortal] = []
        self.next_off = 0.0
        """The error of the log-probabilities of replicas that are started from now on."""
        self.actor = Sender(self.log)
        self.pool = RolloutPool(replicas, restart=self.restart)
        self.weights = ActorWeights()
        section = RolloutSection(
            weight_check=weight_check or WeightCheckSection(sequences=2, tokens=5), **rollout
        )
        tell = SimpleNamespace(
            info=lambda event, **fields: self.told.append((event, fields)),
            warning=lambda event, **fields: self.told.append((event, fields)),
        )
        config: Any = SimpleNamespace(
            rollout=section,
            seed=3,
            data=SimpleNamespace(max_prompt_length=8, max_response_length=8),
            model=SimpleNamespace(dtype="float32"),
        )
        plan: Any = SimpleNamespace(
            facts=SimpleNamespace(
                plugins={"rollout": SimpleNamespace(cls=SimpleNamespace(capabilities=capabilities))}
            ),
            placement=SimpleNamespace(
                source=SimpleNamespace(ends_meet=ends_meet, on_each_machine=True)
            ),
            refs={
                "rollout.weight_transport": PluginRef(kind="weight_transport", name="in_process")
            },
        )
        offload_manager: Any = SimpleNamespace(
            present=lambda role: nullcontext(),
            settle=lambda: self.log.append("settle"),
            free_caches=lambda: self.log.append("free caches"),
        )
        self.phases: list[str] = []
        site: Any = SimpleNamespace(
            config=config,
            plan=plan,
            actor=self.actor,
            offloading=offload_manager,
            path=None,
            logger=tell,
            phase=self.phase,
            metrics=lambda: self.metrics,
            weights=self.weights,
            check_stop=lambda: None,
        )
        service: Any = SimpleNamespace(
            held=nullcontext,
            score=lambda sequences: asyncio.run(self.pool.score(sequences)),
            suspend=lambda phase: None,
            resume=lambda: None,
            settle=lambda: None,
            bring_back_with=lambda rescue: None,
        )
        check = WeightCheck.of(config, plan, prompts, TwoSpecial(), tell)
        self.sync = WeightSync(site, service, self.pool, check)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def restart(self, replica: Any) -> Mortal:
        replica.close()
        self.log.append("restart")
        self.made.append(Mortal(self.log, off=self.next_off))
        return self.made[-1]
