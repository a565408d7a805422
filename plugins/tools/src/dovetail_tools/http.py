"""Http: requests to hosts that the config allows."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import httpx2

from dovetail.errors import ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolResult, ToolSchema
from dovetail_tools.config import HttpConfig

MAX_REDIRECTS = 5


class Http(Tool):
    """GET and POST. Cookies are an episode's own; the environment's proxies and `.netrc` are not used."""

    name = "http"
    api = ">=1.0,<2"
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
        # No time limit of its own: the caller's holds.
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
                f"method {method!r:.20} may not be used; allowed are {', '.join(self.config.methods)}"
            )
        content: dict[str, Any] = {}
        if method == "POST":
            content = {
                "content": arguments.get("body", ""),
                "headers": {"content-type": "application/json"},
            }
        try:
            request = state.build_request(method, arguments["url"], **content)
            for _ in range(MAX_REDIRECTS + 1):
                self._check(request.url)
                response = await state.send(request, stream=True)
                try:
                    if response.next_request is None:
                        return await self._answer(response)
                    request = response.next_request
                finally:
                    await response.aclose()
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ToolError(f"{arguments['url']!r:.200} is no address: {error}") from error
        except httpx2.ConnectError as error:
            # A name that the policy made up is its own mistake; that a host is down is a failure of the episode.
            if not _unknown_host(error):
                raise
            raise ToolError(f"there is no host {request.url.host!r}") from error
        raise ToolError(f"more than {MAX_REDIRECTS} redirects")

    def _check(self, url: httpx2.URL) -> None:
        """Refuse a host that is not in the list; asked for every redirect too."""
        host = url.host.rstrip(".").lower()
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
        names = (f"{host}:{port}", host) if port in (80, 443) else (f"{host}:{port}",)
        if url.scheme not in ("http", "https") or not any(
            fnmatchcase(name, pattern.lower()) for name in names for pattern in self.config.hosts
        ):
            raise ToolError(
                f"{url.scheme}://{url.netloc.decode()} may not be asked; allowed are {', '.join(self.config.hosts)}"
            )

    async def _answer(self, response: httpx2.Response) -> ToolResult:
        most = self.config.max_kb << 10
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > most:
                break
        text = bytes(data[:most]).decode(response.charset_encoding or "utf-8", "replace")
        cut = f"\n(cut after {self.config.max_kb} KiB)" if len(data) > most else ""
        return ToolResult(content=f"{response.status_code} {response.reason_phrase}\n{text}{cut}")


def _unknown_host(error: BaseException | None) -> bool:
    """Whether a connection failed since its host's name is not known."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return True
        error = error.__cause__ or error.__context__
    return False
