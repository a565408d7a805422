"""ServerConnection: a client of an engine's server, with requests, answers, and health checks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail_serving.frames import MEDIA_TYPE, Frame, Unpacker, pack, unpack
from dovetail_serving.messages import DRAINING, ENGINE_DIED, PREFIX, error_of

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""Maximum seconds of a connection attempt, and of a health check."""
_REFUSED = (400, 413, 422)
"""HTTP statuses of an invalid request, as opposed to a failed server."""
_END_SECONDS = 10.0
"""Seconds after a broken connection within which an end of the server's process counts as the cause."""
_LAST_WORDS_SECONDS = 3.0
"""Seconds to wait for the server's process to end after its engine has died, so that its last output is in the log."""


class ServerConnection:
    """A client of one server. All methods must be called under the same event loop.

    While a request runs, the connection watches the server's health and, if Dovetail started the server, its process. Once the server is
    found dead, running and later requests fail with the reason.

    Needs the package `httpx2`, a dependency of plugins with servers.

    Args:
        url: the server's address, such as `http://127.0.0.1:8000`.
        engine: the engine's name in messages.
        token: the token that the server requires; empty for no token.
        patience: seconds without an answer to health checks after which the server counts as dead.
        ended: a function that returns how the server's process ended; None if the process runs, or was not started by Dovetail.
        died: a function that returns the error for a dead server, given a text that says how it died.

    Attributes:
        draining: whether the server's latest health answer announced its shutdown.
    """

    def __init__(
        self,
        url: str,
        *,
        engine: str,
        token: str = "",
        patience: float = 60.0,
        ended: Callable[[], str | None] = lambda: None,
        died: Callable[[str], RolloutError] = RolloutError,
    ) -> None:
        import httpx2

        self.url, self.engine = url, engine
        self.draining = False
        self._patience = patience
        self._ended = ended
        self._died = died
        self._death: RolloutError | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            # No read time-out, since an answer takes as long as generation. `_watch_over` detects a dead server.
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_keepalive_connections=8, keepalive_expiry=30.0),
            trust_env=False,
        )

    async def ask(
        self, name: str, header: Mapping[str, Any] | None = None, arrays: Sequence[np.ndarray] = ()
    ) -> Frame:
        """Post a frame (a binary message) to one of the server's paths below `/dovetail/v1/`, and return the frame of the answer.

        Args:
            name: the last part of the path, such as `load`.
            header: the JSON values to send.
            arrays: the arrays to send, [n] each, as in `frames.pack`.

        Raises:
            RolloutError: the server refused, failed, or is dead.
        """
        import httpx2

        async def asking() -> Frame:
            try:
                response = await self._http.post(
                    PREFIX + name,
                    content=pack(header or {}, arrays),
                    headers={"content-type": MEDIA_TYPE},
                )
            except httpx2.HTTPError as error:
                raise await self._broken(error) from error
            if not _has_frames(response):
                raise self._failure(response, name)
            return unpack(response.content)

        return await self._watched(asking())

    async def stream(
        self, name: str, content: bytes, answered: Callable[[], None], take: Callable[[Frame], None]
    ) -> None:
        """Post a request to a path below `/dovetail/v1/`, and call `take` with each frame (binary message) of the answer on arrival.

        Args:
            name: the last part of the path, such as `generate`.
            content: the request.
            answered: a function that is called when the server has accepted the request.
            take: a function that is called with each frame.

        Raises:
            RolloutError: the server refused, failed midway, or is dead.
        """
        import httpx2

        async def streaming() -> None:
            unpacker = Unpacker()
            try:
                request = self._http.stream(
                    "POST", PREFIX + name, content=content, headers={"content-type": MEDIA_TYPE}
                )
                async with request as response:
                    if not _has_frames(response):
                        await response.aread()
                        raise self._failure(response, name)
                    answered()
                    async for piece in response.aiter_raw():
                        for frame in unpacker.feed(piece):
                            if frame.header.get("kind") == ENGINE_DIED:
                                await self._engine_died(frame)
                            take(frame)
            except httpx2.HTTPError as error:
                raise await self._broken(error) from error

        await self._watched(streaming())

    async def lines(self, path: str, body: Mapping[str, Any], take: Callable[[str], bool]) -> None:
        """Post JSON to one of the engine's own paths, and call `take` with each line of the answer on arrival.

        Args:
            path: the engine's path, such as `/v1/completions`.
            body: the request.
            take: a function that is called with each line and returns whether to continue; if not, the connection is closed.

        Raises:
            RequestRefusedError: the server refused the request; has the server's message.
            RolloutError: the server failed, or is dead.
        """
        import httpx2

        async def streaming() -> None:
            try:
                async with self._http.stream("POST", path, json=dict(body)) as response:
                    if response.status_code != httpx2.codes.OK:
                        await response.aread()
                        refused = response.status_code in _REFUSED
                        raise (RequestRefusedError if refused else RolloutError)(
                            f"the {self.engine} server at {self.url} answered {path} with status "
                            f"{response.status_code}: {_message(response)}"
                        )
                    # httpx2's `aiter_lines` would also split at U+2028, which may occur in JSON strings.
                    rest = b""
                    async for piece in response.aiter_bytes():
                        *lines, rest = (rest + piece).split(b"\n")
                        for line in lines:
                            if not take(line.decode().removesuffix("\r")):
                                return
                    if rest:
                        take(rest.decode())
            except httpx2.HTTPError as error:
                raise await self._broken(error) from error

        await self._watched(streaming())

    async def health(self, timeout: float = CONNECT_SECONDS) -> int:
        """Return the HTTP status of the engine's health path: 200 if the engine is healthy, 503 if it died.

        Raises:
            httpx2.HTTPError: no answer came.
        """
        response = await self._http.get("/health", timeout=timeout)
        self.draining = DRAINING in response.headers
        return response.status_code

    async def get(self, path: str) -> httpx2.Response:
        """Send a GET request to one of the engine's own paths and return the answer.

        Raises:
            httpx2.HTTPError: no answer came.
        """
        return await self._http.get(path, timeout=CONNECT_SECONDS)

    async def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.cancel()
        await self._http.aclose()

    @property
    def alive(self) -> bool:
        """Whether no check has found the server dead. If Dovetail started the server, this property checks the process, too."""
        if self._death is None and (how := self._ended()) is not None:
            self._die(how)
        return self._death is None

    def refuse_dead(self) -> None:
        """Raise an error if the server was found dead.

        Raises:
            RolloutError: the server was found dead.
        """
        if self._death is not None:
            raise self._dead()

    # Detection of a dead server

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine and return its result; raise an error if the server dies meanwhile."""
        if self._death is not None:
            work.close()
            self.refuse_dead()
        task = asyncio.ensure_future(work)
        self._running.add(task)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_over())
        try:
            # With the shield, a cancelled caller does not cancel the task; a cancelled task therefore means `_die`.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self.refuse_dead()
            task.cancel()
            raise
        finally:
            self._running.discard(task)

    async def _watch_over(self) -> None:
        """Check the server's process and health periodically while requests run."""
        import httpx2

        silent_since: float | None = None
        while self._running:
            await asyncio.sleep(min(2.0, self._patience / 4))
            if (how := self._ended()) is not None:
                self._die(how)
                return
            try:
                status = await self.health(min(CONNECT_SECONDS, self._patience))
            except httpx2.ConnectError as error:
                await self._refused(error)
                return
            except httpx2.HTTPError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since >= self._patience:
                    self._die(
                        f"has answered no health check for {self._patience:g} s ({type(error).__name__})"
                    )
                    return
                continue
            silent_since = None
            if status == httpx2.codes.SERVICE_UNAVAILABLE:
                self._die("reports that its engine has died")
                return

    def _die(self, how: str) -> None:
        if self._death is None:
            self._death = self._died(f"the server at {self.url} {how}")
        for task in self._running:
            task.cancel()

    def _dead(self) -> RolloutError:
        """Return a new exception with the reason of the server's death, since each request raises its own."""
        assert self._death is not None
        return RolloutError(self._death.message, hint=self._death.hint)

    async def _broken(self, error: Exception) -> RolloutError:
        """Return the error for a broken connection, after finding out whether the server died or only this request failed."""
        import httpx2

        deadline = time.monotonic() + _END_SECONDS
        while self._death is None and time.monotonic() < deadline:
            if (how := self._ended()) is not None:
                self._die(how)
                break
            try:
                status = await self.health(deadline - time.monotonic())
            except httpx2.ConnectError as refused:
                if isinstance(error, httpx2.ConnectError):
                    await self._refused(refused)
            except httpx2.HTTPError:
                pass
            else:
                if status == httpx2.codes.OK:
                    break
            await asyncio.sleep(0.2)
        if self._death is not None:
            return self._dead()
        return RolloutError(
            f"a request to the {self.engine} server at {self.url} failed, because the connection broke: {type(error).__name__}: {error}"
        )

    async def _engine_died(self, frame: Frame) -> None:
        await self._process_end()
        self._die(f"lost its engine: {frame.header.get('error')}")
        self.refuse_dead()

    async def _refused(self, error: Exception) -> None:
        """Handle a refused connection. A killed process closes its sockets before its exit status is known, so wait for the status."""
        self._die(await self._process_end() or f"refuses connections ({error})")

    async def _process_end(self) -> str | None:
        """Wait briefly for the end of the server's process; return how it ended, None if it runs or was not started by Dovetail."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (how := self._ended()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return how

    def _failure(self, response: httpx2.Response, name: str) -> RolloutError:
        """Return the error for an answer without frames: the error that Dovetail's server states in JSON, or the start of any other text.

        If the server states that its engine died, the server counts as dead from now on.
        """
        try:
            answer = json.loads(response.content)
            error = error_of(answer)
        except (ValueError, AttributeError):
            return RolloutError(
                f"the {self.engine} server at {self.url} answered {name!r} with status {response.status_code} and "
                f"{response.headers.get('content-type', 'no type')}: {response.text[:200]!r}"
            )
        if answer.get("kind") == ENGINE_DIED:
            self._die(f"lost its engine: {error.message}")
            return self._dead()
        return error


def _has_frames(response: httpx2.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type") == MEDIA_TYPE


def _message(response: httpx2.Response) -> str:
    """Return the message of an OpenAI-compatible server's error; the beginning of the text if the form is another."""
    try:
        found = json.loads(response.content)
        return str(found.get("message") or found["error"])
    except (ValueError, AttributeError, KeyError):
        return response.text[:500]
