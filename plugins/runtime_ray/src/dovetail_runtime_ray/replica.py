"""A rollout replica in another process, as the controller sees it: a BaseRollout whose completions stream in."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from dovetail.errors import RolloutError, WorkerError
from dovetail.interfaces import (
    BaseRollout,
    Completion,
    PauseMode,
    RolloutRequest,
    WeightManifest,
    WorkerSpec,
)
from dovetail.metrics import Metric
from dovetail_runtime_ray.completions import Message
from dovetail_runtime_ray.gather import LOOK_SECONDS
from dovetail_runtime_ray.health import stopped, why_lost
from dovetail_runtime_ray.launch import RunProcesses
from dovetail_runtime_ray.pool import BUSY_SECONDS, CLOSE_SECONDS, STACKS_SECONDS
from dovetail_runtime_ray.process import CONTROL
from dovetail_runtime_ray.wire import ProcessInfo, Reply, WireFailure

_ALIVE_SECONDS = 30.0
"""Seconds that a replica may take to answer that it is alive."""
Item = Completion | Exception | None
"""An item of a request's stream: a sample, an error, or None at the end."""


class RequestStreams:
    """The running requests of one event loop, with a queue of samples for each.

    Args:
        actor: handle of a `ReplicaProcess`.
        title: the replica's name in errors.
    """

    def __init__(self, actor: Any, title: str) -> None:
        self._actor, self._title = actor, title
        self._inboxes: dict[str, asyncio.Queue[Item]] = {}
        self._waiting: list[RolloutRequest] = []
        self._readers: set[asyncio.Task[None]] = set()

    def add(self, request: RolloutRequest) -> asyncio.Queue[Item]:
        """Send a request at the end of this iteration of the event loop, and return the queue of its samples.

        The queue ends with None or an error.

        Raises:
            RolloutError: a request with that id is running.
        """
        if request.request_id in self._inboxes:
            raise RolloutError(
                f"two requests have the id {request.request_id!r}",
                hint="give every request an id of its own",
            )
        inbox: asyncio.Queue[Item] = asyncio.Queue()
        self._inboxes[request.request_id] = inbox
        self._waiting.append(request)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._send)
        return inbox

    def remove(self, request: RolloutRequest) -> None:
        """Remove a request that no reader waits for."""
        self._inboxes.pop(request.request_id, None)
        self._waiting = [waiting for waiting in self._waiting if waiting is not request]

    def _send(self) -> None:
        requests, self._waiting = self._waiting, []
        if not requests:
            return
        task = asyncio.get_running_loop().create_task(self._read(requests))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _read(self, requests: list[RolloutRequest]) -> None:
        try:
            stream = self._actor.submit.options(
                num_returns="streaming", name="rollout.submit()"
            ).remote(requests)
            async for ref in stream:
                self._take(await asyncio.wrap_future(ref.future()))
        except ray.exceptions.RayError as error:
            self._end(requests, error)
        else:
            self._end(
                requests,
                RolloutError(
                    f"{self._title} ended the stream of a request before all its samples had arrived"
                ),
            )

    def _take(self, message: Message) -> None:
        if message.completions is not None:
            for completion in message.completions.unpack():
                self._put(completion.request_id, completion)
        for name, failure in message.failed:
            self._put(name, failure.unpack().error)
        for name in message.ended:
            self._put(name, None)

    def _put(self, name: str, item: Item) -> None:
        inbox = self._inboxes.get(name)
        if inbox is not None:
            inbox.put_nowait(item)

    def _end(self, requests: list[RolloutRequest], error: Exception) -> None:
        """Raise an error in the readers of these requests; requests that have ended already have no reader."""
        for request in requests:
            self._put(request.request_id, error)


class RayReplica(BaseRollout):
    """The controller's handle of a rollout replica in a separate process. Calls may come from any thread and event loop.

    When the process dies, the replica's running and later requests fail with a RolloutError, and the rollout pool sends them to
    other replicas.

    Args:
        spec: the worker's spec.
        actor: the handle of a `ReplicaProcess`.
        number: the replica's number.
        facts: the facts about the replica's process.
        run: the state shared with the run's other processes.
        receivers: the number of the engine's weight receivers.
    """

    name = "ray_replica"
    api = ">=1.0,<2"

    def __init__(
        self,
        spec: WorkerSpec,
        actor: Any,
        number: int,
        facts: ProcessInfo,
        run: RunProcesses,
        receivers: int,
    ) -> None:
        super().__init__(spec.plugin.config, spec.context)
        self._receivers = receivers
        self.number, self.facts = number, facts
        self._printing = f"{spec.role}-{number}"
        self._actor = actor
        self._run, self._health, self._logger = run, run.health, run.logger
        self._dead: str | None = None
        self._closed = False
        self._streams: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, RequestStreams] = (
            weakref.WeakKeyDictionary()
        )
        run.health.watch(actor.watch.options(concurrency_group=CONTROL).remote(), self._lost)

    async def submit(self, request: RolloutRequest) -> AsyncGenerator[Completion, None]:
        """Yield the request's samples as they arrive. See `BaseRollout` for errors."""
        self._check_alive()
        streams = self._streams_here()
        inbox = streams.add(request)
        ended = False
        try:
            while True:
                item = await self._next(inbox, request)
                if isinstance(item, Completion):
                    yield item
                    continue
                ended = True
                if isinstance(item, Exception):
                    raise self._as_rollout_error(item)
                return
        finally:
            streams.remove(request)
            if not ended and self._dead is None and not self._closed:
                self._actor.forget.remote((request.request_id,))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._control("abort", tuple(request_ids))

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        await self._control("pause", mode)

    async def resume(self) -> None:
        await self._control("resume")

    async def reset_cache(self) -> None:
        await self._control("reset_cache")

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        self._blocking("check_manifest", version, manifest)

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        self._blocking("receive_weights", version, manifest)

    @property
    def machine(self) -> str | None:
        return self.facts.machine

    @property
    def receivers(self) -> int:
        return self._receivers

    def alive(self) -> bool:
        """Return whether the process and its engine live."""
        if self._dead is not None or self._closed:
            return False
        try:
            return bool(self._blocking("alive", within=_ALIVE_SECONDS))
        except (RolloutError, WorkerError):
            return False

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        return await self._control("score", sequences)

    def metrics(self) -> Mapping[str, Metric]:
        return self._blocking("metrics")

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        # Engines of interface version 1.0 lack this argument.
        named = {} if keep_weights else {"keep_weights": False}
        return int(self._blocking("sleep", tags, **named))

    def wake(self, tags: frozenset[str]) -> None:
        self._blocking("wake", tags)

    def close(self) -> None:
        """Close the engine and end its process; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._dead is None:
            # Also if the run has failed: only `close` releases what the engine holds outside its process.
            failed = self._health.error is not None
            patience = BUSY_SECONDS if failed else CLOSE_SECONDS
            try:
                ray.get(self._actor.close.remote(), timeout=patience)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if not failed:
                    self._logger.warning(f"{self.title} did not close cleanly: {why_lost(error)}")
        ray.kill(self._actor, no_restart=True)

    @property
    def title(self) -> str:
        """The replica's name in errors, such as `rollout replica 0`."""
        return f"rollout replica {self.number}"

    # Waiting

    async def _next(self, inbox: asyncio.Queue[Any], request: RolloutRequest) -> Any:
        """Return the next item of a request; raise RolloutError if the replica is silent beyond its time limit."""
        if not inbox.empty():
            return inbox.get_nowait()
        began, limit = time.monotonic(), self._run.limits.of("submit")
        while True:
            try:
                return await asyncio.wait_for(inbox.get(), LOOK_SECONDS * 4)
            except TimeoutError:
                self._check_health("submit()")
                if time.monotonic() - began < limit:
                    continue
            words = await asyncio.to_thread(self._stacks)
            raise RolloutError(
                f"{self.title} ({self.facts.described()}) sent nothing for request {request.request_id!r} "
                f"within {limit:g} seconds{words}",
                hint="raise runtime.time_limits.submit if a response takes that long",
            )

    async def _control(self, method: str, *args: object) -> Any:
        self._check_alive()
        ref = self._actor.control.options(name=f"rollout.{method}()").remote(method, args, {})
        try:
            reply: Reply = await asyncio.wrap_future(ref.future())
        except ray.exceptions.RayError as error:
            raise self._gone(error) from error
        return self._opened(method, reply)

    def _blocking(
        self, method: str, *args: object, within: float | None = None, **named: object
    ) -> Any:
        self._check_alive()
        limit = within or self._run.limits.of(method)
        ref = self._actor.control.options(name=f"rollout.{method}()").remote(method, args, named)
        deadline = time.monotonic() + limit
        while not ray.wait([ref], timeout=LOOK_SECONDS)[0]:
            self._check_health(f"{method}()")
            if time.monotonic() >= deadline:
                raise WorkerError(
                    f"{self.title} ({self.facts.described()}) gave no answer to {method}() within "
                    f"{limit:g} seconds{self._stacks()}",
                    rank=self.number,
                    call=method,
                    hint=f"raise runtime.time_limits.{method} if the work takes that long",
                    lost=True,
                )
        try:
            reply: Reply = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise self._gone(error) from error
        return self._opened(method, reply)

    def _opened(self, method: str, reply: Reply) -> Any:
        for warned in reply.warnings:
            self._logger.warning(**{**warned, "where": self.title})
        if isinstance(reply.result, WireFailure):
            raise reply.result.raised_in(f"{method}() of {self.title}")
        return reply.result

    # Health

    def _check_alive(self) -> None:
        if self._closed:
            raise RolloutError(f"{self.title} is closed")
        if self._dead is not None:
            raise RolloutError(self._dead)

    def _check_health(self, what: str) -> None:
        """Raise an error for the call `what` if a process of the run has failed, since trainer and replicas depend on each other."""
        if self._health.error is not None:
            raise stopped(f"{self.title}: {what}", self._health.error)

    def _gone(self, error: Exception) -> RolloutError:
        """Return the error of a replica that Ray has lost or can't call."""
        if isinstance(error, ray.exceptions.RayTaskError):
            return RolloutError(f"{self.title} could not be called: {error.cause}")
        if self._dead is None:
            printed = self._run.printed(self._printing)
            where = self.facts.described()
            self._dead = f"{self.title} ({where}) died: {why_lost(error)}{printed}"
        return RolloutError(self._dead)

    def _as_rollout_error(self, error: Exception) -> Exception:
        if isinstance(error, ray.exceptions.RayError):
            return self._gone(error)
        if isinstance(error, RolloutError):
            return error
        failed = RolloutError(f"{self.title} failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed

    def _lost(self, error: Exception) -> None:
        if not self._closed:
            self._logger.warning(self._gone(error).message)

    def _stacks(self) -> str:
        ref = self._actor.stacks.options(concurrency_group=CONTROL).remote()
        try:
            return f"; its stacks:\n{ray.get(ref, timeout=STACKS_SECONDS)}"
        except (ray.exceptions.RayError, TimeoutError):
            return "; it did not send its stacks either"

    def _streams_here(self) -> RequestStreams:
        loop = asyncio.get_running_loop()
        if loop not in self._streams:
            self._streams[loop] = RequestStreams(self._actor, self.title)
        return self._streams[loop]
