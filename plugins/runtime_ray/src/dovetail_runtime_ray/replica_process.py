"""The code of a rollout replica's process: the engine on an event loop, and streams of generated samples."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

from dovetail.errors import RolloutError
from dovetail.interfaces import BaseRollout, Completion, RolloutRequest, WorkerSpec, closable
from dovetail.workers import WorkerHost, stacks
from dovetail_runtime_ray.completions import Message, pack
from dovetail_runtime_ray.process import Process
from dovetail_runtime_ray.wire import ProcessInfo, ProcessSetup, Reply, WireFailure

GATHER_SECONDS = 0.005
"""Seconds that a message waits for further completions, since fewer messages cost less."""


class ReplicaProcess(Process):
    """The process of one rollout replica. Every method is a coroutine, so that no method blocks another."""

    def __init__(self, setup: ProcessSetup) -> None:
        super().__init__(setup)
        self._engine: BaseRollout | None = None
        self._host: WorkerHost | None = None
        self._streams: dict[str, asyncio.Task[None]] = {}

    async def whereabouts(self) -> ProcessInfo:
        """Return where this process runs, its id and its accelerators."""
        return self.facts()

    async def start(self, spec: WorkerSpec) -> Reply:
        """Construct and start the engine, and return its number of weight receivers."""

        def act() -> int:
            self._host = WorkerHost(self.prepare())
            rank = self.setup.rank
            engine = self._host.start(self.spec_here(spec), BaseRollout, mesh=None, rank=rank)
            self._engine = cast("BaseRollout", engine)
            return self._engine.receivers

        return await self._aside(act)

    async def submit(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Message, None]:
        """Submit requests to the engine together, and yield messages with finished samples."""
        inbox: asyncio.Queue[tuple[str, Completion | WireFailure | None]] = asyncio.Queue()
        for request in requests:
            self._streams[request.request_id] = asyncio.create_task(self._run(request, inbox))
        running = {request.request_id for request in requests}
        try:
            while running:
                items = [await inbox.get()]
                await asyncio.sleep(GATHER_SECONDS)
                while not inbox.empty():
                    items.append(inbox.get_nowait())
                completions = [item for _, item in items if isinstance(item, Completion)]
                ended = tuple(name for name, item in items if item is None)
                failed = tuple((n, item) for n, item in items if isinstance(item, WireFailure))
                running -= {*ended, *(name for name, _ in failed)}
                yield Message(
                    completions=pack(completions) if completions else None,
                    ended=ended,
                    failed=failed,
                )
        finally:
            await self.forget(tuple(running))

    async def forget(self, request_ids: Sequence[str]) -> None:
        """Abort requests that no reader waits for."""
        tasks = [self._streams.pop(name) for name in request_ids if name in self._streams]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def control(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Reply:
        """Call a method of the engine other than `submit`; a blocking method runs in a thread."""
        act = getattr(self._started(), method)
        if not asyncio.iscoroutinefunction(act):
            return await self._aside(functools.partial(act, *args, **named))
        try:
            result = await act(*args, **named)
        except Exception as error:  # noqa: BLE001 - raised again where it was called
            return Reply(result=WireFailure.now(error), warnings=self.logs.warnings())
        return Reply(result=result, warnings=self.logs.warnings())

    async def close(self) -> None:
        """End every request, and close the engine."""
        await self.forget(tuple(self._streams))
        if self._host is not None:
            await asyncio.to_thread(self._host.close)
        self.logs.close()

    async def stacks(self) -> str:
        """Return the stack of every thread."""
        return stacks()

    async def watch(self) -> None:
        """Wait forever: the call fails as soon as the process dies, which notifies the controller."""
        await asyncio.Event().wait()

    async def _run(self, request: RolloutRequest, inbox: asyncio.Queue[tuple[str, Any]]) -> None:
        name = request.request_id
        try:
            async with aclosing(closable(self._started().submit(request))) as completions:
                async for completion in completions:
                    inbox.put_nowait((name, completion))
            inbox.put_nowait((name, None))
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; the controller raises it again
            inbox.put_nowait((name, WireFailure.now(error)))
        finally:
            # If `forget` has removed this task, a new request may have the same id by now.
            if self._streams.get(name) is asyncio.current_task():
                del self._streams[name]

    async def _aside(self, act: Callable[[], Any]) -> Reply:
        return await asyncio.to_thread(self.answer, act)

    def _started(self) -> BaseRollout:
        if self._engine is None:
            raise RolloutError("the replica's engine has not started")
        return self._engine
