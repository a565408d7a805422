"""Http: a tool that sends requests to the hosts that the config allows."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import httpx2

from dovetail.errors import ToolError, causes
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolResult, ToolSchema
from dovetail_tools.config import HttpConfig

MAX_REDIRECTS = 5
MAX_URL = 8000
"""Maximum characters of a URL; hosts close the connection at longer URLs."""
FIRST_PAUSE = 0.5
"""Seconds before the first retry. The wait doubles with each retry."""
LONGEST_PAUSE = 30.0
"""Maximum seconds of `Retry-After`; a host that asks for more counts as down."""
REFUSED = (425, 429, 503)
"""Statuses of a host that did not process the request."""
RETRIED = (408, 502, 504)
"""Further statuses after which a retry may succeed."""


class Http(Tool):
    """Makes GET and POST requests. Cookies are kept for an episode; the environment's proxies and `.netrc` are not used."""

    name = "http"
    api = ">=2.0,<3"
    Config = HttpConfig

    def __init__(self, config: HttpConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._ssl: ssl.SSLContext | None = None

    def start(self) -> None:
        self._ssl = ssl.create_default_context()

    def schemas(self) -> Sequence[ToolSchema]:
        hosts = f"Allowed hosts: {', '.join(self.config.hosts)}."
        properties: dict[str, Any] = {"url": {"type": "string", "description": hosts}}
        if len(self.config.methods) > 1:
            properties["method"] = {"type": "string", "enum": list(self.config.methods)}
        if "POST" in self.config.methods:
            properties["body"] = {"type": "string", "description": "JSON to send with POST."}
        function = {
            "name": "http",
            "description": "Send an HTTP request, and return status and text of the answer.",
            "parameters": {"type": "object", "properties": properties, "required": ["url"]},
        }
        return ({"type": "function", "function": function},)

    async def open(self, episode: EpisodeInfo) -> httpx2.AsyncClient:
        # No time-out here, since the caller limits the time of the whole call.
        return httpx2.AsyncClient(
            headers=self.config.headers, verify=self._ssl or True, timeout=None, trust_env=False
        )

    async def release(self, state: httpx2.AsyncClient) -> None:
        await state.aclose()

    async def call(
        self, state: httpx2.AsyncClient, name: str, arguments: Mapping[str, Any]
    ) -> ToolResult:
        method = arguments.get("method", self.config.methods[0])
        if method not in self.config.methods:
            raise ToolError(
                f"the method {method!r:.20} is not allowed; expected one of {', '.join(self.config.methods)}"
            )
        content: dict[str, Any] = {}
        if method == "POST":
            content = {
                "content": arguments.get("body", ""),
                "headers": {"content-type": "application/json"},
            }
        if len(arguments["url"]) > MAX_URL:
            raise ToolError(
                f"the url has {len(arguments['url'])} characters; expected {MAX_URL} at most"
            )
        for attempt in range(self.config.retries):
            try:
                return await self._asked(state, method, arguments["url"], content)
            except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
                pause = _asked_pause(error, method)
            await asyncio.sleep(max(pause, FIRST_PAUSE * 2**attempt))
        return await self._asked(state, method, arguments["url"], content)

    async def _asked(
        self, client: httpx2.AsyncClient, method: str, url: str, content: Mapping[str, Any]
    ) -> ToolResult:
        """Send a request, and follow redirects.

        Raises:
            ToolError: the URL that the policy gave is invalid or redirects too often, or a host does not exist or is not allowed.
            HTTPStatusError: the host is busy, or failed.
            RequestError: the host can't be reached, or its answer can't be read.
        """
        try:
            request = client.build_request(method, url, **content)
            for _ in range(MAX_REDIRECTS + 1):
                self._check(request.url)
                response = await client.send(request, stream=True)
                try:
                    if response.next_request is None:
                        return await self._answer(response)
                    request = response.next_request
                finally:
                    await response.aclose()
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ToolError(f"{url!r:.200} is not a URL: {error}") from error
        except httpx2.ConnectError as error:
            if not self._made_up(request.url.host, error):
                raise
            raise ToolError(f"the host {request.url.host!r} does not exist") from error
        raise ToolError(f"the request was redirected more than {MAX_REDIRECTS} times")

    def _made_up(self, host: str, error: BaseException) -> bool:
        """Return whether a connection failed because the policy made up a host name.

        True if the error says that the host name is unknown, and the config allows the host only by a pattern such as `*.example.org`. A
        host that the config names in full is not made up by the policy.
        """
        found = next((one for one in causes(error) if isinstance(one, socket.gaierror)), None)
        named = {
            one.partition(":")[0].lower() for one in self.config.hosts if not set("*?[") & set(one)
        }
        return found is not None and found.errno != socket.EAI_AGAIN and host not in named

    def _check(self, url: httpx2.URL) -> None:
        """Raise a ToolError if the config does not allow a URL's host, or the scheme is not HTTP(S); called for every redirect too."""
        host = url.host.rstrip(".").lower()
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
        names = (f"{host}:{port}", host) if port in (80, 443) else (f"{host}:{port}",)
        if url.scheme not in ("http", "https") or not any(
            fnmatchcase(name, pattern.lower()) for name in names for pattern in self.config.hosts
        ):
            raise ToolError(
                f"{url.scheme}://{url.netloc.decode()} is not allowed; expected one of {', '.join(self.config.hosts)}"
            )

    async def _answer(self, response: httpx2.Response) -> ToolResult:
        status = f"{response.status_code} {response.reason_phrase}"
        if response.is_server_error or response.status_code in (408, 425, 429):
            raise httpx2.HTTPStatusError(
                f"{response.url.host} answered {status}",
                request=response.request,
                response=response,
            )
        most = self.config.max_kb << 10
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > most:
                break
        try:
            text = bytes(data[:most]).decode(response.charset_encoding or "utf-8", "replace")
        except (LookupError, UnicodeError):  # the host named an unknown encoding
            text = bytes(data[:most]).decode("utf-8", "replace")
        cut = f"\n(cut after {self.config.max_kb} KiB)" if len(data) > most else ""
        return ToolResult(content=f"{status}\n{text}{cut}")


def _asked_pause(error: httpx2.TransportError | httpx2.HTTPStatusError, method: str) -> float:
    """Return the seconds that a host asks to wait before a retry; raise the error if a retry is useless or unsafe.

    A POST is sent again only if the host did not process it, since the host may have acted on a request that it did not answer.
    """
    status, header = None, ""
    if isinstance(error, httpx2.HTTPStatusError):
        status, header = error.response.status_code, error.response.headers.get("retry-after", "")
    again = isinstance(error, httpx2.ConnectError) or status in REFUSED
    if not again and (method == "POST" or status not in (None, *RETRIED)):
        raise error
    try:
        pause = float(header or 0.0)
    except ValueError:  # Retry-After may be a date, which is ignored
        pause = 0.0
    if not pause <= LONGEST_PAUSE:
        raise error
    return pause
