"""HttpPost: posts JSON to one address and reads an answer of bounded size, for scoring services and judges."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces import FailureKind
from dovetail.workers import LoopThread

RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a retry may succeed."""
MAX_ANSWER_BYTES = 64 << 20
"""Maximum size of an answer, in bytes."""
_CONNECT_TIMEOUT = 10.0
_CLOSE = 2.0
"""Seconds that closing the connections may take."""


@attrs.define(kw_only=True, eq=False)
class PostError(Exception):
    """An HTTP request failed."""

    kind: FailureKind
    what: str
    """The part of the error message that follows the address."""
    retryable: bool
    retry_after: str | None = None
    """The answer's header `Retry-After`."""


class HttpPost:
    """Posts requests to one address, from any event loop; the connections live on a separate event loop.

    Args:
        url: the address.
        headers: the headers of each request, without the content type.
        timeout: the time limit of one request in seconds; None for no limit.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json", **headers}
        self._timeout = timeout
        self._client: Any = None
        self._loop: LoopThread | None = None

    async def post(self, content: bytes) -> bytes:
        """Post a request and return the body of the answer.

        Raises:
            PostError: the request failed, or its status was not 200.
        """
        self._loop = self._loop or LoopThread("dovetail-reward-http")
        return await self._loop.run(self._posted(content))

    async def _posted(self, content: bytes) -> bytes:
        import httpx2

        if self._client is None:
            # httpx2's time-outs apply to each read, so a slow server could exceed them; `asyncio.timeout` limits the whole request.
            self._client = httpx2.AsyncClient(
                timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT)
            )
        unreachable = FailureKind.UNREACHABLE
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(
                    "POST", self.url, content=content, headers=self._headers
                ) as reply,
            ):
                async for part in reply.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        what = f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB"
                        raise PostError(kind=FailureKind.INVALID_VALUE, what=what, retryable=False)
        except TimeoutError:
            what = f"did not answer within {self._timeout or 0:g} s"
            raise PostError(kind=FailureKind.TIMEOUT, what=what, retryable=True) from None
        except httpx2.HTTPError as error:
            what = f"can't be reached: {type(error).__name__}: {error}"
            raise PostError(kind=unreachable, what=what, retryable=True) from error
        if reply.status_code != 200:
            passes = reply.status_code in RETRYABLE_STATUS
            shown = body[:200].decode("utf-8", "replace")
            raise PostError(
                kind=unreachable if passes else FailureKind.EXCEPTION,
                what=f"answered with status {reply.status_code}: {shown!r}",
                retryable=passes,
                retry_after=reply.headers.get("retry-after"),
            )
        return bytes(body)

    def close(self) -> None:
        """Close the open connections; safe to call twice."""
        client, self._client = self._client, None
        if client is not None and self._loop is not None:
            with suppress(Exception):  # an open connection ends with the process anyway
                self._loop.wait(client.aclose(), _CLOSE)
            self._loop.close()


def credential(name: str | None, manager: str) -> str | None:
    """Return the value of the environment variable `name`; None if `name` is None.

    Args:
        name: the option `auth_env` of the config.
        manager: the reward manager, for messages.

    Raises:
        ConfigError: the variable is not set.
    """
    if name is None:
        return None
    secret = os.environ.get(name)
    if not secret:
        raise ConfigError(
            f"auth_env of reward manager {manager!r} names the environment variable {name!r}, which is not set",
            hint=f"export {name}=…, or set auth_env=null",
        )
    return secret
