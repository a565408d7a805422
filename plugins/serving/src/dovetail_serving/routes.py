"""An ASGI middleware that adds Dovetail's paths to an engine's server; a Host connects the paths to the engine."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from dovetail.errors import DovetailError, RolloutError
from dovetail_serving.backend import SampleCall, SampleResult
from dovetail_serving.frames import MEDIA_TYPE, Frame, pack, unpack
from dovetail_serving.messages import DRAINING, PREFIX, calls_of, packed_error, packed_result

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 1 << 30
"""Maximum size of a request's body in bytes, far more than the tokens of a batch or a manifest take."""

_QUIET_SECONDS = 5.0
"""Seconds without generation after which a server counts as drained; its rollout checks the health every two seconds."""

_ANSWERED = frozenset(
    {
        "describe",
        "abort",
        "score",
        "reset_cache",
        "load",
        "freeze",
        "thaw",
        "sleep",
        "wake",
        "metrics",
    }
)
"""Paths that a host answers by its method of the same name."""

log = logging.getLogger("dovetail_serving")


class Host(ABC):
    """Interface to the engine inside a server's process.

    Every method but `generate` takes a frame (a binary message with a JSON header) and returns a frame. Exceptions are sent to the
    caller by name and text.
    """

    @abstractmethod
    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample; cancelling the task aborts the sample."""

    @abstractmethod
    async def describe(self, _: Frame) -> Frame:
        """Return a description of the running engine: `protocol` (version of the message format), and data that the plugin checks."""

    @abstractmethod
    async def abort(self, frame: Frame) -> Frame:
        """Abort the calls named in the header's `calls`."""

    @abstractmethod
    async def score(self, frame: Frame) -> Frame:
        """Return the log-probabilities, float32 [L_i − 1] each, of the sequences in the frame's arrays."""

    @abstractmethod
    async def reset_cache(self, _: Frame) -> Frame:
        """Drop the prefix cache."""

    @abstractmethod
    async def connect(self, frame: Frame) -> Frame:
        """Create receivers of weights for the transport that `info` in the frame's header describes; return an `Outcome` in a frame."""

    @abstractmethod
    async def load(self, frame: Frame) -> Frame:
        """Receive, verify and load the weights that `manifest` in the frame's header describes; return a frame that holds an `Outcome`."""

    async def freeze(self, _: Frame) -> Frame:
        """Pause all calls until `thaw`, keeping their keys and values.

        Raises:
            RolloutError: the engine can't pause calls.
        """
        raise RolloutError(
            "the server's engine can't pause running requests and keep their KV cache: set rollout.keep_cache=false"
        )

    async def thaw(self, _: Frame) -> Frame:
        """Continue the paused calls; for errors see `freeze`."""
        raise RolloutError(
            "the server's engine can't continue paused requests: it does not support pausing requests"
        )

    @abstractmethod
    async def sleep(self, frame: Frame) -> Frame:
        """Free the memory that the request's header names by `tags` (`weights`, `kv_cache`). The reply's header has `freed`, the bytes.

        If the request's `keep_weights` is true, `wake` restores the weights.
        """

    @abstractmethod
    async def wake(self, frame: Frame) -> Frame:
        """Allocate again the memory that `sleep` freed, of the kinds that the frame's header lists under `tags`."""

    @abstractmethod
    async def metrics(self, _: Frame) -> Frame:
        """Return a frame whose header has the totals since the server's start: numbers by name."""


class Routes(ABC):
    """ASGI application that answers requests below `/dovetail/v1/` and forwards other requests to the engine's application.

    Token ids and log-probabilities are sent in binary frames (`frames`) instead of JSON. If the server was started with the environment
    variable `token_variable`, requests must carry the variable's value as a bearer token.

    Args:
        app: the engine's application.
    """

    token_variable: ClassVar[str]
    """Name of the server's environment variable whose value is the required bearer token."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._token = os.environ.get(self.token_variable, "")
        self._host: Host | None = None
        self._draining = False
        self._generating = 0

    @abstractmethod
    def make_host(self, scope: Scope) -> Host:
        """Return a `Host` for the running engine; called once, at the first request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._draining and scope["type"] == "http" and scope["path"] == "/health":
            send = _with_notice(send)
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        if not self._known(scope):
            await _answer(
                send, 401, {"error": "the access token is wrong or missing", "kind": "RolloutError"}
            )
            return
        host = self._host = self._host or self.make_host(scope)
        name = scope["path"].removeprefix(PREFIX)
        framed = dict(scope["headers"]).get(b"content-type") == MEDIA_TYPE.encode()
        body = await _body(receive, MAX_BODY_BYTES if framed else 0)
        if body is None and framed:
            message = f"the request's body is too large; expected at most {MAX_BODY_BYTES} bytes"
            await _answer(send, 413, {"error": message, "kind": "RequestRefusedError"})
            return
        if body is None:
            # A web page in a browser can send other content types to the loopback interface without a CORS preflight.
            message = f"the request's body has another content type; expected {MEDIA_TYPE}"
            await _answer(send, 415, {"error": message, "kind": "RolloutError"})
            return
        if name == "generate":
            self._generating += 1
            try:
                await _generate(host, body, receive, send)
            finally:
                self._generating -= 1
            return
        own = {"connect": self._connect, "drain": self._drain}
        answer = own.get(name) or (getattr(host, name) if name in _ANSWERED else None)
        if answer is None:
            await _answer(
                send,
                404,
                {"error": f"the path {scope['path']} does not exist", "kind": "RolloutError"},
            )
            return
        await _answered(answer, body, send)

    def _known(self, scope: Scope) -> bool:
        if not self._token:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    async def _drain(self, _: Frame) -> Frame:
        """Announce the server's shutdown to its rollout, and answer when no generation is left."""
        self._draining = True
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < _QUIET_SECONDS:
            await asyncio.sleep(_QUIET_SECONDS / 20)
            if self._generating:
                quiet_since = time.monotonic()
        return Frame(header={})

    async def _connect(self, frame: Frame) -> Frame:
        """Connect the weight transport; without a token, refuse a transport in a file, whose code this process would run."""
        assert self._host is not None
        path = frame.header["info"]["transport"]["path"]
        if path is not None and not self._token:
            raise RolloutError(
                f"the weight transport {path!r} is refused: it is a file whose code this server would run, but this server requires no "
                f"access token. Start the server with a token in {self.token_variable}, and set the same token for the run"
            )
        return await self._host.connect(frame)


async def _generate(host: Host, body: bytes, receive: Receive, send: Send) -> None:
    """Generate all calls of a request concurrently, and send each result as a frame when it is finished."""
    try:
        calls = calls_of(unpack(body))
    except DovetailError as error:
        await _answer(send, 400, {"error": error.message, "kind": type(error).__name__})
        return
    finished: asyncio.Queue[bytes] = asyncio.Queue()

    async def one(call: SampleCall) -> None:
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
            await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        # If the client has disconnected, cancelling the calls aborts them in the engine.
        for task in (*tasks, gone):
            task.cancel()


def _with_notice(send: Send) -> Send:
    async def noticed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (DRAINING.encode(), b"1")]
            message = {**message, "headers": headers}
        await send(message)

    return noticed


async def _answered(answer: Callable[[Frame], Awaitable[Frame]], body: bytes, send: Send) -> None:
    try:
        frame = await answer(unpack(body) if body else Frame(header={}))
    except Exception as error:
        log.exception("a request from the rollout failed")
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


async def _body(receive: Receive, most: int) -> bytes | None:
    """Read a request's body; return None, without reading the rest, if it has more than `most` bytes."""
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        most -= len(pieces[-1])
        if most < 0:
            return None
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
