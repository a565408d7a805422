"""Mcp: the tools of a server that speaks the Model Context Protocol, through its official SDK."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from dovetail.errors import ConfigError, PluginBrokenError, PluginNeedsError, ToolError, nearest
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolResult, ToolSchema
from dovetail.workers import LoopThread
from dovetail_tools.config import McpConfig

T = TypeVar("T")

_CLOSE_SECONDS = 20.0
"""Time limit for closing all servers; the SDK kills a server that does not end within 6 s."""


class Mcp(Tool):
    """Tool whose functions are the tools of an MCP server. Each episode has its own connection and, with `command`, its own server.

    Connections run on an event loop in a separate thread.
    """

    name = "mcp"
    api = ">=2.0,<3"
    Config = McpConfig

    def __init__(self, config: McpConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if (config.command is None) == (config.url is None):
            raise ConfigError(
                f"the tool 'mcp' has command={config.command!r} and url={config.url!r}; expected exactly one of the two",
                hint="set `command` to start a server, or `url` to use a running one",
            )
        self._loop: LoopThread | None = None
        self._tools: dict[str, Any] = {}
        self._starting = asyncio.Semaphore(os.cpu_count() or 1)
        self._shared = self._connection(once=False)
        self._open: set[_Connection] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(config.max_connections)

    def start(self) -> None:
        """Connect to the server, or start it, and list its tools.

        Raises:
            PluginNeedsError: the MCP SDK is not installed.
            PluginBrokenError: the server did not start, did not answer in time, or lacks a tool that the config names.
        """
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise PluginNeedsError(
                f"tool 'mcp' needs the module {error.name!r}, which is not installed",
                hint="pip install 'dovetail-tools[mcp]'",
            ) from error
        limit = self.config.start_timeout
        self._loop = LoopThread("tool-mcp")
        try:
            found = self._loop.wait(self._list(), 2 * limit)
        except Exception as error:
            self.close()
            raise PluginBrokenError(
                f"the MCP server {self._title} did not list its tools within {limit:g} s: {_cause(error)!r}",
                hint="start the server by hand to see its messages",
            ) from error
        self._tools = {tool.name: tool for tool in found}
        for name in self.config.functions or ():
            if name not in self._tools:
                self.close()
                near = nearest(name, self._tools)
                raise PluginBrokenError(
                    f"the MCP server {self._title} has no tool {name!r}; it has {', '.join(sorted(self._tools))}",
                    hint=f"did you mean {near!r}?"
                    if near
                    else "correct the tool's setting `functions`",
                )
        if self.config.functions is not None:
            self._tools = {name: self._tools[name] for name in self.config.functions}

    def close(self) -> None:
        """Disconnect, and end the servers that this tool started."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with suppress(TimeoutError):
                loop.wait(_closed({self._shared, *self._open}), _CLOSE_SECONDS)
            loop.close()

    def schemas(self) -> Sequence[ToolSchema]:
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": f"{self.config.prefix}{tool.name}",
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                },
            }
            for tool in self._tools.values()
        )

    async def open(self, episode: EpisodeInfo) -> _Connection | None:
        if self.config.shared:
            return None
        await self._places.acquire()
        connection = self._connection(once=True)
        self._open.add(connection)
        try:
            await self._there(connection.client())
        except BaseException as error:
            await self.release(connection)
            if not isinstance(error, Exception):
                raise
            raise ConnectionError(
                f"the MCP server {self._title} can't be reached: {error!r}"
            ) from error
        return connection

    async def release(self, state: _Connection | None) -> None:
        if state is not None:
            # The episode does not wait for its server to end. Its slot of `max_connections` is free afterwards.
            ending = asyncio.ensure_future(self._end(state))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, connection: _Connection) -> None:
        try:
            await self._there(connection.close())
            self._open.discard(connection)
        finally:
            self._places.release()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the event loop that holds the connections."""
        assert self._loop is not None
        return await self._loop.run(work)

    async def call(
        self, state: _Connection | None, name: str, arguments: Mapping[str, Any]
    ) -> ToolResult:
        name = name.removeprefix(self.config.prefix)
        answer = await self._there(self._asked(state or self._shared, name, dict(arguments)))
        content = _content(answer)
        if answer.is_error:
            text = content if isinstance(content, str) else json.dumps(content)
            if self.config.fail_on == "error" or (
                self.config.fail_on == "crash" and _crashed(name, text)
            ):
                raise RuntimeError(f"the MCP server {self._title} answered with an error: {text}")
            raise ToolError(text)
        return ToolResult(content=content)

    async def _asked(self, connection: _Connection, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool of the server and return the answer; runs on the event loop of the connections."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST

        closed = (
            (CONNECTION_CLOSED,)
            if self.config.url is None
            else (CONNECTION_CLOSED, INVALID_REQUEST)
        )
        for again in (not connection.once, False):
            client = await connection.client()
            try:
                # If this is cancelled, the SDK notifies the server.
                return await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code == INVALID_PARAMS:
                    raise ToolError(
                        f"the tool {name!r} does not accept these arguments: {error}"
                    ) from error
                if error.code not in closed:
                    raise
                connection.drop(client)
                if not again:
                    raise ConnectionError(f"the MCP server {self._title} ended: {error}") from error
        raise AssertionError

    async def _list(self) -> list[Any]:
        """Return the server's tools, from all pages of its list."""
        found: list[Any] = []
        cursor = None
        client = await self._shared.client()
        async with asyncio.timeout(self.config.start_timeout):
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
        if not self.config.shared:
            await self._shared.close()
        return found

    def _connection(self, *, once: bool) -> _Connection:
        return _Connection(self._server, self.config.start_timeout, self._starting, once=once)

    @property
    def _title(self) -> str:
        return self.config.url or " ".join((self.config.command, *self.config.args))

    def _server(self) -> Any:
        if self.config.command is not None:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            server = StdioServerParameters(
                command=self.config.command,
                args=list(self.config.args),
                env=dict(self.config.env) or None,
                cwd=self.config.cwd,
            )
            return stdio_client(server, errlog=sys.__stderr__ or sys.stderr)
        if not self.config.headers:
            return self.config.url
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        client = create_mcp_http_client(headers=dict(self.config.headers))
        return streamable_http_client(self.config.url, http_client=client)


class _Connection:
    """A connection to a server, made on first use and held by its own task. All methods run on one event loop.

    Args:
        server: a function that returns the address or transport for the SDK's client.
        limit: seconds that connecting may take.
        starting: a semaphore that bounds concurrent attempts to connect.
        once: whether to stay closed after the server has ended, since the server's state is lost.
    """

    def __init__(
        self, server: Callable[[], Any], limit: float, starting: asyncio.Semaphore, *, once: bool
    ) -> None:
        self.once = once
        self._server, self._limit, self._starting = server, limit, starting
        self._ready: asyncio.Future[Any] | None = None
        self._end = asyncio.Event()
        self._held: set[asyncio.Task[None]] = set()

    async def client(self) -> Any:
        """Return the client; concurrent callers share one attempt to connect."""
        if self._ready is None:
            self._ready, self._end = asyncio.get_running_loop().create_future(), asyncio.Event()
            held = asyncio.create_task(self._hold(self._ready, self._end))
            self._held.add(held)
            held.add_done_callback(self._held.discard)
        return await asyncio.shield(self._ready)

    def drop(self, client: Any) -> None:
        """Discard a client whose server has ended, so that the next call of `client` connects again."""
        ready = self._ready
        if not self.once and ready is not None and ready.done() and ready.result() is client:
            self._end.set()
            self._ready = None

    async def close(self) -> None:
        """Disconnect, and end the server if the client started it."""
        self._end.set()
        if self._held:
            await asyncio.wait(self._held)

    async def _hold(self, ready: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Connect, and disconnect when `end` is set; `ready` gets the client or the error.

        One task does both, since anyio requires that the task that entered a cancel scope also leaves it.
        """
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                async with self._starting, asyncio.timeout(self._limit):
                    # anyio's cancel scopes must nest, and the client opens scopes that outlive the time limit.
                    client = await stack.enter_async_context(Client(self._server()))
                ready.set_result(client)
                await end.wait()
        except Exception as error:  # noqa: BLE001 - raised where a client is asked for
            if not ready.done():  # otherwise the SDK raises in the waiting calls
                ready.set_exception(_cause(error))
                ready.exception()  # mark as retrieved: the waiting task may be gone
        finally:
            if self._ready is ready and not self.once:
                self._ready = None


async def _closed(connections: Collection[_Connection]) -> None:
    await asyncio.gather(*(one.close() for one in connections))


def _crashed(name: str, text: str) -> bool:
    """Return whether a tool raised an unexpected exception: servers of the Python SDK then answer with the tool's name only."""
    inner = r"(: Error (executing tool|reading resource) \S+)*"
    return re.fullmatch(f"Error executing tool {re.escape(name)}{inner}", text) is not None


def _content(answer: Any) -> Any:
    """Return the content of a tool's answer: a text, or a list of text and image parts if the answer has images."""
    parts = []
    for block in answer.content:
        if block.type == "text":
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image":
            parts.append({"type": "image", "image": f"data:{block.mime_type};base64,{block.data}"})
        else:
            parts.append({"type": "text", "text": block.model_dump_json(exclude_none=True)})
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _cause(error: Exception) -> Exception:
    """Return the first error of an exception group, or the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
