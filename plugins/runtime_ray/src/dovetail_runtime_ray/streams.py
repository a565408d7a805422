"""Requests to one rollout replica under one event loop: those of one turn go out together, and share a stream back."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from dovetail.errors import RolloutError
from dovetail.interfaces import Completion, RolloutRequest
from dovetail_runtime_ray.completions import Message

Item = Completion | Exception | None
"""A sample; what went wrong; or None at the end."""


class RequestStreams:
    """The running requests of one event loop.

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
        """Send a request at the end of this turn of the loop; its samples arrive here, then None or an error.

        Raises:
            RolloutError: a request of that id is running.
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
            self._end(requests, RolloutError(f"{self._title} ended a stream before its samples"))

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
        """The stream is over: whoever still listens hears why; who has ended already does not listen."""
        for request in requests:
            self._put(request.request_id, error)
