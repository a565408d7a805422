"""Mcp: the tools of a server that speaks the Model Context Protocol, through its official SDK."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from dovetail.errors import ConfigError, PluginBrokenError, PluginNeedsError, ToolError, nearest
from dovetail.interfaces import PluginContext, Tool, ToolResult, ToolSchema
from dovetail_tools.config import McpConfig


class Mcp(Tool):
    """Every tool of a server is a function. All episodes share one connection, in a thread of its own."""

    name = "mcp"
    api = ">=1.0,<2"
    Config = McpConfig

    def __init__(self, config: McpConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if (config.command is None) == (config.url is None):
            raise ConfigError(
                f"an mcp tool has command={config.command!r} and url={config.url!r}; expected one of them",
                hint="set `command` for a server to start, or `url` for one that runs",
            )
        self._stack = ExitStack()
        self._portal: Any = None
        self._client: Any = None
        self._tools: dict[str, Any] = {}

    def start(self) -> None:
        """Connect, or start the server, and ask for its tools.

        Raises:
            PluginNeedsError: the SDK is not installed.
            PluginBrokenError: it did not start, did not answer in time, or lacks a tool that the config names.
        """
        try:
            from anyio.from_thread import start_blocking_portal
            from mcp import Client
        except ModuleNotFoundError as error:
            raise PluginNeedsError(
                f"tool 'mcp' needs the module {error.name!r}, which is not installed",
                hint="pip install 'dovetail-tools[mcp]'",
            ) from error
        limit = self.config.start_timeout
        try:
            self._portal = self._stack.enter_context(start_blocking_portal())
            client = Client(self._server())
            connected = self._portal.wrap_async_context_manager(_Connected(client, limit))
            self._client = self._stack.enter_context(connected)
            found = self._portal.call(_tools_of, client, limit)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            raise PluginBrokenError(
                f"the MCP server {self._title} gave no tools within {limit:g} s: {_cause(error)!r}",
                hint="start it by hand to see what it says",
            ) from error
        self._tools = {tool.name: tool for tool in found}
        for name in self.config.functions or ():
            if name not in self._tools:
                self.close()
                near = nearest(name, self._tools)
                raise PluginBrokenError(
                    f"the MCP server {self._title} has no tool {name!r}; it has {', '.join(sorted(self._tools))}",
                    hint=f"did you mean {near!r}?" if near else "change `functions`",
                )
        if self.config.functions is not None:
            self._tools = {name: self._tools[name] for name in self.config.functions}

    def close(self) -> None:
        """Disconnect; a server that was started here is ended."""
        stack, self._stack = self._stack, ExitStack()
        self._portal = self._client = None
        stack.close()

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

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        # Where this is cancelled, so is the call in the portal's loop, which tells the server.
        running = self._portal.start_task_soon(
            self._client.call_tool, name.removeprefix(self.config.prefix), dict(arguments)
        )
        try:
            answer = await asyncio.wrap_future(running)
        except MCPError as error:
            if error.code != INVALID_PARAMS:
                raise
            raise ToolError(f"{name!r} does not take these arguments: {error}") from error
        content = _content(answer)
        if answer.is_error:
            raise ToolError(content if isinstance(content, str) else json.dumps(content))
        return ToolResult(content=content)

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


class _Connected:
    """A client while it is connected; connecting has a time limit."""

    def __init__(self, client: Any, limit: float) -> None:
        self._client, self._limit = client, limit

    async def __aenter__(self) -> Any:
        # Not anyio's scope of a time limit: the client opens scopes that outlive it.
        async with asyncio.timeout(self._limit):
            return await self._client.__aenter__()

    async def __aexit__(self, *failure: object) -> Any:
        return await self._client.__aexit__(*failure)


async def _tools_of(client: Any, limit: float) -> list[Any]:
    """All pages of a server's list."""
    found: list[Any] = []
    cursor = None
    async with asyncio.timeout(limit):
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found


def _content(answer: Any) -> Any:
    """Text where all parts are text; else parts."""
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


def _cause(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
