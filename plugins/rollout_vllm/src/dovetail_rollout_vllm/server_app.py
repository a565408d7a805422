"""What a vLLM server serves for Dovetail: an ASGI middleware, named on vLLM's command line.

`--middleware dovetail_rollout_vllm.server_app.DovetailRoutes` adds paths below `/dovetail/v1/` to vLLM's own. They drive the
engine that the server runs, with frames (`server_wire`) in place of a JSON object for every token, and answer only
those who know the token in the variable `DOVETAIL_VLLM_TOKEN`, where the server was started with one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dovetail.errors import DovetailError
from dovetail_rollout_vllm.server_host import ServerHost
from dovetail_rollout_vllm.server_messages import (
    PREFIX,
    TOKEN_VARIABLE,
    calls_of,
    packed_error,
    packed_result,
)
from dovetail_rollout_vllm.server_wire import MEDIA_TYPE, Frame, pack, unpack

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("dovetail.vllm.server")


class DovetailRoutes:
    """Answers what is below `/dovetail/v1/` and hands the rest on.

    Args:
        app: vLLM's application.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        self._host: ServerHost | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        if not self._known(scope):
            await _answer(
                send, 401, {"error": "the token is wrong or missing", "kind": "RolloutError"}
            )
            return
        if self._host is None:
            self._host = ServerHost(scope["app"].state.engine_client, scope["app"].state.args)
        name, body = scope["path"].removeprefix(PREFIX), await _body(receive)
        if body and dict(scope["headers"]).get(b"content-type") != MEDIA_TYPE.encode():
            # Web pages can send other types to a server on the loopback interface without being asked who they are.
            said = f"a body here is of type {MEDIA_TYPE}"
            await _answer(send, 415, {"error": said, "kind": "RolloutError"})
            return
        if name == "generate":
            await self._generate(body, receive, send)
            return
        answer = {
            "describe": self._host.describe,
            "abort": self._host.abort,
            "score": self._host.score,
            "reset_cache": self._host.reset_cache,
            "connect": self._host.connect,
            "load": self._host.load,
            "sleep": self._host.sleep,
            "wake": self._host.wake,
            "figures": self._host.figures,
        }.get(name)
        if answer is None:
            await _answer(send, 404, {"error": f"no path {scope['path']}", "kind": "RolloutError"})
            return
        await _answered(answer, body, send)

    def _known(self, scope: Scope) -> bool:
        if not self._token:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    async def _generate(self, body: bytes, receive: Receive, send: Send) -> None:
        """Generate all calls of a request together; each goes back as a frame once it is finished."""
        host = self._host
        assert host is not None
        try:
            calls = calls_of(unpack(body))
        except DovetailError as error:
            await _answer(send, 400, {"error": error.message, "kind": type(error).__name__})
            return
        finished: asyncio.Queue[bytes] = asyncio.Queue()

        async def one(call: Any) -> None:
            try:
                finished.put_nowait(packed_result(call.call_id, await host.generate(call)))
            except Exception as error:  # noqa: BLE001 - it travels to the caller
                finished.put_nowait(packed_error(call.call_id, error))

        tasks = [asyncio.create_task(one(call)) for call in calls]
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send(_start(200, MEDIA_TYPE))
            left = len(tasks)
            while left and not gone.done():
                following = asyncio.create_task(finished.get())
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    break
                pieces = [following.result()]
                while not finished.empty():
                    pieces.append(finished.get_nowait())
                left -= len(pieces)
                await send(
                    {"type": "http.response.body", "body": b"".join(pieces), "more_body": True}
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            # Who is gone wants nothing any more: cancelling a call aborts it in the engine.
            for task in (*tasks, gone):
                task.cancel()


async def _answered(answer: Callable[[Frame], Awaitable[Frame]], body: bytes, send: Send) -> None:
    try:
        frame = await answer(unpack(body) if body else Frame(header={}))
    except Exception as error:
        log.exception("a request failed")
        kind = type(error).__name__
        await _answer(send, 500, {"error": str(error) or kind, "kind": kind})
        return
    await send(_start(200, MEDIA_TYPE))
    data = pack(frame.header, frame.arrays)
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _answer(send: Send, status: int, value: dict[str, Any]) -> None:
    await send(_start(status, "application/json"))
    await send(
        {"type": "http.response.body", "body": json.dumps(value).encode(), "more_body": False}
    )


def _start(status: int, media_type: str) -> Message:
    headers = [(b"content-type", media_type.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
