"""Task workers as Ray actors: spread over the cluster's machines, each with a task that answers calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import attrs
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.errors import PlacementError, WorkerError
from dovetail.interfaces import Logger, Task, TaskSpec, TaskWorker, load_target
from dovetail.telemetry import get_logger
from dovetail.workers import check_plugins
from dovetail_runtime_ray.capacity import EPSILON, Node
from dovetail_runtime_ray.health import Health, why_lost
from dovetail_runtime_ray.launch import actor_class
from dovetail_runtime_ray.logs import last_printed
from dovetail_runtime_ray.pool import CLOSE_SECONDS
from dovetail_runtime_ray.process import CONTROL, Process
from dovetail_runtime_ray.wire import ProcessInfo, ProcessSetup, Reply, WireFailure

_MANY_CALLS = 100_000
"""Most calls under way in one process."""


class TaskProcess(Process):
    """What runs in the process: the task on an event loop, so that no call keeps another waiting."""

    def __init__(self, setup: ProcessSetup) -> None:
        super().__init__(setup)
        self._task: Task | None = None

    async def start(self, target: str, given: bytes) -> tuple[ProcessInfo, Reply]:
        """Make the task."""

        def act() -> None:
            if self.setup.plugins is not None:
                check_plugins(self.setup.plugins, where=f"a worker on {self.facts().host}")
            self._task = load_target(target)(given, get_logger())

        return self.facts(), await asyncio.to_thread(self.answer, act)

    async def call(self, payload: bytes) -> bytes:
        """Return the task's answer."""
        assert self._task is not None
        return await self._task.call(payload)

    async def close(self) -> None:
        """Close the task."""
        if self._task is not None:
            await asyncio.to_thread(self._task.close)
        self.logs.close()

    async def watch(self) -> None:
        """Wait for ever: the controller hears of the process's death at once."""
        await asyncio.Event().wait()


@attrs.frozen(kw_only=True)
class TaskSettings:
    """What every task worker shares."""

    setup: Callable[[int], ProcessSetup]
    """The setup of a process, from its number."""
    nodes: Callable[[], list[Node]]
    """The living machines."""
    health: Health
    logger: Logger
    ending: ExitStack
    """Ends them with the runtime."""
    run_directory: str | None
    """Holds their log files."""


class TaskWorkers:
    """The task workers of one spec."""

    def __init__(self, spec: TaskSpec, around: TaskSettings) -> None:
        self._spec, self._around = spec, around
        self._given = ray.put(spec.setup)
        self._homes: dict[int, Node] = {}

    def start(self, numbers: Sequence[int]) -> list[TaskWorker]:
        """Start these, and wait until all are ready. For errors see `Runtime.task_workers`."""
        spec, around = self._spec, self._around
        self._find_homes(numbers)
        actors = [self._actor(number) for number in numbers]
        try:
            refs = [actor.start.remote(spec.target, self._given) for actor in actors]
            facts = self._ready(numbers, refs)
        except BaseException:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            raise
        made: list[TaskWorker] = []
        for number, actor, place in zip(numbers, actors, facts, strict=True):
            worker = RayTaskWorker(number, actor, place, spec, around, self._again)
            around.ending.callback(worker.close)
            made.append(worker)
        return made

    def _again(self, number: int) -> TaskWorker:
        alive = {node.node_id for node in self._around.nodes()}
        home = self._homes.get(number)
        if home is not None and home.node_id not in alive:
            del self._homes[number]
        return self.start([number])[0]

    def _find_homes(self, numbers: Sequence[int]) -> None:
        """A machine for each that has none: those with the fewest of them first, where accelerators are enough."""
        nodes = self._around.nodes()
        homes = [home.node_id for home in self._homes.values()]
        taken = {node.node_id: homes.count(node.node_id) for node in nodes}
        new: dict[str, int] = {}
        needs = {"CPU": self._spec.cpus, "GPU": float(self._spec.accelerators)}
        for number in numbers:
            if number in self._homes:
                continue
            fitting = [
                node
                for node in nodes
                if all(
                    node.free.get(kind, 0.0) + EPSILON >= each * (new.get(node.node_id, 0) + 1)
                    for kind, each in needs.items()
                    if each
                )
            ]
            if not fitting:
                raise PlacementError(
                    f"{self._spec.label} asks for {self._spec.count} processes with {self._spec.cpus:g} CPUs and "
                    f"{self._spec.accelerators} accelerators each. Free: "
                    + ("; ".join(node.described() for node in nodes) or "no machine"),
                    hint="leave them out of runtime's pools (gpus_per_node, workers_per_node), or ask for fewer",
                )
            home = min(fitting, key=lambda node: taken[node.node_id])
            self._homes[number] = home
            taken[home.node_id] += 1
            new[home.node_id] = new.get(home.node_id, 0) + 1

    def _actor(self, number: int) -> Any:
        spec = self._spec
        setup = self._around.setup(number)
        if not spec.accelerators:
            setup = attrs.evolve(setup, visible=())
        return (
            actor_class(TaskProcess)
            .options(
                num_cpus=spec.cpus,
                num_gpus=spec.accelerators,
                max_restarts=0,
                max_concurrency=_MANY_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    self._homes[number].node_id, soft=False
                ),
                runtime_env=setup.runtime_env(),
            )
            .remote(setup)
        )

    def _ready(self, numbers: Sequence[int], refs: Sequence[Any]) -> list[ProcessInfo]:
        spec = self._spec
        _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=spec.start_timeout)
        if waiting:
            late = [number for number, ref in zip(numbers, refs, strict=True) if ref in waiting]
            raise WorkerError(
                f"{spec.label} workers {late} of {spec.count} were not ready within {spec.start_timeout:g} s",
                rank=late[0],
                call="start",
                lost=True,
            )
        found = []
        for number, ref in zip(numbers, refs, strict=True):
            try:
                facts, reply = ray.get(ref)
            except ray.exceptions.RayError as error:
                printed = last_printed(self._around.run_directory, f"{spec.label}-{number}")
                raise WorkerError(
                    f"{spec.label} worker {number} of {spec.count} died while it started: {why_lost(error)}{printed}",
                    rank=number,
                    call="start",
                    lost=True,
                ) from error
            if isinstance(reply.result, WireFailure):
                failure = reply.result.unpack()
                failure.error.add_note(
                    f"raised in the start of {spec.label} worker {number} ({facts.described()})"
                )
                raise failure.error
            found.append(facts)
        return found


class RayTaskWorker(TaskWorker):
    """One of them, as the controller sees it."""

    def __init__(
        self,
        number: int,
        actor: Any,
        facts: ProcessInfo,
        spec: TaskSpec,
        around: TaskSettings,
        start_again: Callable[[int], TaskWorker],
    ) -> None:
        self.where = f"{spec.label} worker {number} ({facts.described()})"
        self._number, self._actor, self._spec, self._around = number, actor, spec, around
        self._start_again = start_again
        self._lost: str | None = None
        self._ended = False
        around.health.watch(
            actor.watch.options(concurrency_group=CONTROL).remote(), self._hear_of_death
        )

    @property
    def lost(self) -> str | None:
        return self._lost

    def call(self, payload: bytes) -> Future[bytes]:
        answer: Future[bytes] = Future()
        if self._lost is not None:
            # One that is being killed may answer still.
            answer.set_exception(WorkerError(self._lost, rank=self._number, call="call", lost=True))
            return answer
        asked = self._actor.call.remote(payload).future()
        asked.add_done_callback(lambda done: self._settle(done, answer))
        return answer

    def kill(self) -> None:
        self._ended = True
        self._lost = self._lost or f"{self.where} was ended"
        ray.kill(self._actor, no_restart=True)

    def again(self) -> TaskWorker:
        self.kill()
        self._around.health.check(f"starting {self.where} again")
        return self._start_again(self._number)

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._lost is None:
            try:
                ray.get(self._actor.close.remote(), timeout=CLOSE_SECONDS)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._around.logger.warning(
                    f"{self.where} did not close cleanly: {why_lost(error)}"
                )
        self.kill()

    def _settle(self, done: Future[bytes], answer: Future[bytes]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
            return
        if isinstance(error, ray.exceptions.RayTaskError):
            text = f"{self.where} raised {error.cause!r}"
            answer.set_exception(WorkerError(text, rank=self._number, call="call"))
            return
        self._hear_of_death(error)
        answer.set_exception(
            WorkerError(str(self._lost), rank=self._number, call="call", lost=True)
        )

    def _hear_of_death(self, error: BaseException) -> None:
        if self._lost is not None:
            return
        name = f"{self._spec.label}-{self._number}"
        printed = last_printed(self._around.run_directory, name)
        self._lost = f"{self.where} died: {why_lost(error)}{printed}"
        self._around.logger.warning(self._lost)
