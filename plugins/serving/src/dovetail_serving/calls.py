"""ServerCalls: sends generation calls to a server in batches, and assigns answers to calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable
from secrets import token_hex
from typing import Any

import attrs

from dovetail.errors import RolloutError
from dovetail_serving.backend import SampleCall, SampleResult
from dovetail_serving.connection import ServerConnection
from dovetail_serving.frames import Frame
from dovetail_serving.messages import nothing_yet, packed_calls, result_of

_GATHER_SECONDS = 0.002
"""Seconds that a call waits for further calls, to be sent in one request."""


@attrs.define(eq=False)
class _Running:
    """A running call, with its state."""

    call: SampleCall
    name: str
    """The call's name at the server. Names are never reused, so that a late answer is not taken for another call's."""
    result: asyncio.Future[SampleResult]
    taken: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Event that is set when the server has received the call, or the request has failed."""


class ServerCalls:
    """Generates samples on one server. All methods must be called under the same event loop.

    Args:
        connection: the connection to the server.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._names = (f"dovetail-{token_hex(4)}-{number}" for number in itertools.count())
        self._waiting: list[_Running] = []
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample; cancelling the task aborts it on the server.

        Raises:
            RolloutError: generation failed.
        """
        self._connection.refuse_dead()
        if call.call_id in self._running:
            raise RolloutError(
                f"two running calls have the id {call.call_id!r}; give every call an id of its own"
            )
        loop = asyncio.get_running_loop()
        running = _Running(call, next(self._names), loop.create_future())
        self._running[call.call_id] = running
        if not self._waiting:
            loop.call_later(_GATHER_SECONDS, self._send)
        self._waiting.append(running)
        try:
            return await running.result
        except asyncio.CancelledError:
            self._in_background(self._abort_there([running]))
            raise
        finally:
            self._running.pop(call.call_id, None)

    async def abort(self, call_ids: Iterable[str]) -> None:
        """Abort these calls: `generate` returns the tokens generated so far.

        Raises:
            RolloutError: the server failed.
        """
        await self._abort_there([self._running[one] for one in call_ids if one in self._running])

    def _send(self) -> None:
        """Send the calls collected so far as one request."""
        batch, self._waiting = self._waiting, []
        batch = [running for running in batch if not running.result.done()]
        if batch:
            self._in_background(self._answer(batch))

    async def _answer(self, batch: list[_Running]) -> None:
        by_name = {running.name: running for running in batch}

        def taken() -> None:
            for running in batch:
                running.taken.set()

        def take(frame: Frame) -> None:
            running = by_name.pop(frame.header.get("call", ""), None)
            if running is not None and not running.result.done():
                found = result_of(frame)
                if isinstance(found, SampleResult):
                    running.result.set_result(found)
                else:
                    running.result.set_exception(found)

        failure = f"the {self._connection.engine} server ended its answer without this sample"
        hint = None
        try:
            content = packed_calls({one.name: one.call for one in batch})
            await self._connection.stream("generate", content, taken, take)
        except RolloutError as error:
            failure, hint = error.message, error.hint
        except Exception as error:
            failure = f"the answer of the {self._connection.engine} server can't be read: {error!r}"
            raise
        finally:
            taken()
            for running in by_name.values():
                if not running.result.done():
                    # Each call gets its own exception object, since raising one object repeatedly grows its traceback.
                    running.result.set_exception(RolloutError(failure, hint=hint))

    async def _abort_there(self, calls: list[_Running]) -> None:
        """Abort calls: an unsent call ends without tokens; the others are aborted on the server once it has received them all."""
        unsent = [running for running in calls if running in self._waiting]
        for running in unsent:
            self._waiting.remove(running)
            if not running.result.done():
                running.result.set_result(nothing_yet(running.call))
        sent = [running for running in calls if running not in unsent]
        if sent:
            await asyncio.gather(*(running.taken.wait() for running in sent))
            await self._connection.ask("abort", {"calls": [running.name for running in sent]})

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: the waiting calls got the error
