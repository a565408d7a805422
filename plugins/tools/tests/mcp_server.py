"""A small MCP server for tests: `python mcp_server.py` uses standard input and output, or HTTP if a port is given."""

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("little")
pages: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def crash(why: str) -> str:
    """Raise what the server does not expect."""
    raise ConnectionRefusedError(why)


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def goto(page: str = "") -> str:
    """Go to a page, and return it; without one, return where it is."""
    pages.append(page)
    return next(filter(None, reversed(pages)), "nowhere")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def pid() -> str:
    """Return the process id."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
