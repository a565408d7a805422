"""Task workers as Ray actors: spread over the cluster's machines, each with a task that answers calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dovetail.errors import PlacementError, WorkerError
from dovetail.interfaces import Task, TaskSpec, TaskWorker, load_target
from dovetail.telemetry import get_logger
from dovetail.workers import check_plugins
from dovetail_runtime_ray.capacity import EPSILON, Node
from dovetail_runtime_ray.health import why_lost
from dovetail_runtime_ray.launch import RunProcesses, start_actor
from dovetail_runtime_ray.pool import CLOSE_SECONDS
from dovetail_runtime_ray.process import CONTROL, Process
from dovetail_runtime_ray.wire import ProcessInfo, ProcessSetup, Reply, WireFailure

_MANY_CALLS = 100_000
"""Maximum number of concurrent calls in one process."""


class TaskProcess(Process):
    """A process outside the pools that runs one `Task`, such as reward computation, on an event loop, so that no call blocks another."""

    def __init__(self, setup: ProcessSetup) -> None:
        super().__init__(setup)
        self._task: Task | None = None

    async def start(self, target: str, given: bytes) -> tuple[ProcessInfo, Reply]:
        """Construct the task; return where its process runs, and whether the construction succeeded.

        Args:
            target: the import path of the task's factory.
            given: the data from which the factory makes the task.
        """

        def act() -> None:
            if self.setup.plugins is not None:
                check_plugins(self.setup.plugins, where=f"a worker on {self.facts().host}")
            self._task = load_target(target)(given, get_logger())

        return self.facts(), await asyncio.to_thread(self.answer, act)

    async def call(self, payload: bytes) -> bytes:
        """Call the task with a payload, and return its answer."""
        assert self._task is not None
        return await self._task.call(payload)

    async def close(self) -> None:
        """Close the task."""
        if self._task is not None:
            await asyncio.to_thread(self._task.close)
        self.logs.close()

    async def watch(self) -> None:
        """Wait forever: the call fails as soon as the process dies, which notifies the controller."""
        await asyncio.Event().wait()


class TaskWorkers:
    """Starts the task workers of one spec: processes outside the pools, each of which runs one `Task`, such as reward computation.

    Args:
        spec: the spec of the workers.
        run: the state shared with all processes of the run.
        setup: a function that returns the set-up of the process with the given number.
        nodes: a function that returns the living nodes.
    """

    def __init__(
        self,
        spec: TaskSpec,
        run: RunProcesses,
        setup: Callable[[int], ProcessSetup],
        nodes: Callable[[], list[Node]],
    ) -> None:
        self._spec, self._run, self._setup, self._nodes = spec, run, setup, nodes
        self._given = ray.put(spec.setup)
        self._homes: dict[int, Node] = {}

    def start(self, numbers: Sequence[int]) -> list[TaskWorker]:
        """Start workers with these numbers, and wait until all are ready. See `Runtime.task_workers` for errors."""
        spec = self._spec
        self._find_homes(numbers)
        actors = {number: self._actor(number) for number in numbers}
        try:
            facts = self._ready(
                {n: a.start.remote(spec.target, self._given) for n, a in actors.items()}
            )
        except BaseException:
            for actor in actors.values():
                ray.kill(actor, no_restart=True)
            raise
        made: list[TaskWorker] = []
        for (number, actor), place in zip(actors.items(), facts, strict=True):
            worker = RayTaskWorker(number, actor, place, spec, self._run, self._again)
            self._run.ending.callback(worker.close)
            made.append(worker)
        return made

    def _again(self, number: int) -> TaskWorker:
        alive = {node.node_id for node in self._nodes()}
        home = self._homes.get(number)
        if home is not None and home.node_id not in alive:
            del self._homes[number]
        return self.start([number])[0]

    def _find_homes(self, numbers: Sequence[int]) -> None:
        """Assign each of these workers that has no machine yet to one with enough free resources, preferably to one with few workers.

        Raises:
            PlacementError: no machine has enough free resources for a worker.
        """
        nodes = self._nodes()
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
                    f"no machine has free resources for another process of {self._spec.label} (in all {self._spec.count}), which needs "
                    f"{self._spec.cpus:g} CPU(s) and {self._spec.accelerators} accelerator(s). Free: "
                    + ("; ".join(node.described() for node in nodes) or "no machine"),
                    hint="lower gpus_per_node or workers_per_node of the runtime's pools to free resources, or ask for fewer processes",
                )
            home = min(fitting, key=lambda node: taken[node.node_id])
            self._homes[number] = home
            taken[home.node_id] += 1
            new[home.node_id] = new.get(home.node_id, 0) + 1

    def _actor(self, number: int) -> Any:
        node = self._homes[number].node_id
        return start_actor(
            TaskProcess,
            self._setup(number),
            num_cpus=self._spec.cpus,
            num_gpus=self._spec.accelerators,
            max_concurrency=_MANY_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )

    def _ready(self, refs: Mapping[int, Any]) -> list[ProcessInfo]:
        spec = self._spec
        lost: dict[str, Any] = {"call": "start", "lost": True}
        answers = self._run.started(
            refs,
            spec.start_timeout,
            spec.label,
            late=lambda numbers: WorkerError(
                f"{spec.label} workers {numbers} of {spec.count} were not ready within {spec.start_timeout:g} s",
                rank=numbers[0],
                **lost,
            ),
            died=lambda number, why: WorkerError(
                f"{spec.label} worker {number} of {spec.count} died while it started: {why}",
                rank=number,
                **lost,
            ),
        )
        for number, (facts, reply) in zip(refs, answers, strict=True):
            if isinstance(reply.result, WireFailure):
                raise reply.result.raised_in(
                    f"the start of {spec.label} worker {number} ({facts.described()})"
                )
        return [facts for facts, _ in answers]


class RayTaskWorker(TaskWorker):
    """The controller's handle of a task worker."""

    def __init__(
        self,
        number: int,
        actor: Any,
        facts: ProcessInfo,
        spec: TaskSpec,
        run: RunProcesses,
        start_again: Callable[[int], TaskWorker],
    ) -> None:
        self.where = f"{spec.label} worker {number} ({facts.described()})"
        self._number, self._actor, self._spec, self._run = number, actor, spec, run
        self._start_again = start_again
        self._lost: str | None = None
        self._ended = False
        run.health.watch(
            actor.watch.options(concurrency_group=CONTROL).remote(), self._hear_of_death
        )

    @property
    def lost(self) -> str | None:
        return self._lost

    def call(self, payload: bytes) -> Future[bytes]:
        answer: Future[bytes] = Future()
        if self._lost is not None:
            # A process that is being killed may still answer.
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
        self._run.health.check(f"starting {self.where} again")
        return self._start_again(self._number)

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._lost is None:
            try:
                ray.get(self._actor.close.remote(), timeout=CLOSE_SECONDS)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._run.logger.warning(f"{self.where} did not close cleanly: {why_lost(error)}")
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
        self._lost = f"{self.where} died: {why_lost(error)}{self._run.printed(name)}"
        self._run.logger.warning(self._lost)
