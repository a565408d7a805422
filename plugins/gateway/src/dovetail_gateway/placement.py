"""Programs in processes of the runtime, possibly on other machines: the caller's side, and the task in the process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import attrs

from dovetail.errors import DovetailError
from dovetail.interfaces import EpisodeError, FailureKind, Runtime, TaskSpec
from dovetail_gateway.config import ProgramPlacement
from dovetail_gateway.program import ProgramEnd, ProgramRun, run_program


class PlacedPrograms:
    """The runtime's processes in which the episodes' programs run. A new program runs in the process with the fewest programs.

    Args:
        runtime: the runtime that starts the processes.
        placement: the number and resources of the processes.

    Raises:
        PlacementError: the runtime starts no processes, or too few CPUs are free.
    """

    def __init__(self, runtime: Runtime, placement: ProgramPlacement) -> None:
        spec = TaskSpec(
            label="programs",
            target=f"{__name__}:ProgramTask",
            setup=b"",
            count=placement.workers,
            cpus=placement.cpus,
        )
        self._workers = runtime.task_workers(spec)
        self._running = [0] * len(self._workers)
        self._starting = [asyncio.Lock() for _ in self._workers]

    async def run(self, run: ProgramRun, until: asyncio.Event) -> ProgramEnd:
        """Run a program in one of the processes until it ends or `until` is set, and return how it ended; see `run_program`.

        Raises:
            EpisodeError: the runtime's process was lost, or can't be restarted. The next program for this process tries to restart it.
        """
        place = self._running.index(min(self._running))
        self._running[place] += 1
        try:
            async with self._starting[place]:
                if self._workers[place].lost is not None:
                    self._workers[place] = await asyncio.to_thread(self._workers[place].again)
            return await self._ask(place, run, until)
        except DovetailError as error:
            raise EpisodeError(FailureKind.ENVIRONMENT, error.message) from error
        finally:
            self._running[place] -= 1

    async def _ask(self, place: int, run: ProgramRun, until: asyncio.Event) -> ProgramEnd:
        worker, stopped = self._workers[place], asyncio.ensure_future(until.wait())
        answer = asyncio.wrap_future(worker.call(json.dumps(attrs.asdict(run)).encode()))
        try:
            either: list[asyncio.Future[Any]] = [answer, stopped]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not answer.done():
                worker.call(json.dumps({"folder": run.folder}).encode())
            # Shielded, so that no process of the program remains even if this is cancelled again.
            await asyncio.shield(asyncio.wait({answer}))
        return ProgramEnd(**json.loads(answer.result()))

    def close(self) -> None:
        """End all programs; safe to call twice."""
        for worker in self._workers:
            worker.close()


class ProgramTask:
    """Runs programs in a process of the runtime."""

    def __init__(self, _setup: bytes, _logger: Any) -> None:
        self._ends: dict[str, asyncio.Event] = {}

    async def call(self, payload: bytes) -> bytes:
        """Run the program in the payload and return its ProgramEnd as JSON.

        A payload with only a `folder` instead ends the program that runs in this folder, and the result is empty.
        """
        asked = json.loads(payload)
        if len(asked) == 1:
            self._ends.get(asked["folder"], asyncio.Event()).set()
            return b""
        until = self._ends[asked["folder"]] = asyncio.Event()
        try:
            return json.dumps(attrs.asdict(await run_program(ProgramRun(**asked), until))).encode()
        finally:
            del self._ends[asked["folder"]]

    def close(self) -> None:
        """Do nothing: running programs end with the process."""
