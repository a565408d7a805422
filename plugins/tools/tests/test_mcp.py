"""Mcp over a real server of the official SDK, on standard input and output and on HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'dovetail-tools[mcp]'")

from dovetail.errors import ConfigError, PluginBrokenError
from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall, ToolSet
from dovetail_sdk.testing.conformance import ToolConformance
from dovetail_tools.config import McpConfig
from dovetail_tools.mcp import Mcp

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": sys.executable, "args": (SERVER,)}


@pytest.mark.nightly
class TestStdio(ToolConformance):
    plugin = Mcp
    config = McpConfig(name="mcp", **STDIO, prefix="my_", functions=("add", "fail", "wait"))
    calls = (("my_add", {"a": 2, "b": 3}, "5"),)
    refused = (
        ("my_fail", {"why": "because"}, "because"),
        ("my_add", {"a": "x", "b": 3}, "is not of type 'integer'"),
        ("my_pid", {}, "there is no function"),
    )
    hanging = ("my_wait", {"seconds": 30})


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL) as server:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
        server.terminate()


@pytest.mark.nightly
def test_a_server_at_an_address_is_used_and_left_running(url):
    for headers in ({}, {"x-key": "k"}):
        tool = Mcp(McpConfig(name="mcp", url=url, headers=headers), PluginContext())
        tool.start()
        assert [one["function"]["name"] for one in tool.schemas()] == ["add", "fail", "wait", "pid"]
        assert asyncio.run(tool.call(None, "add", {"a": 1, "b": 1})).content == "2"
        tool.close()


def test_closing_ends_the_server_that_was_started():
    tool = Mcp(McpConfig(name="mcp", **STDIO), PluginContext())
    tool.start()

    async def pid() -> int:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
            result = await tools.call(ToolCall(id="c", name="pid", arguments={}))
            return int(str(result.content))

    server = asyncio.run(pid())
    os.kill(server, 0)
    tool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"command": "no-such-program"}, "no-such-program gave no tools"),
        ({"command": sys.executable, "args": ("-c", "raise SystemExit(3)")}, "gave no tools"),
        ({"command": sys.executable, "args": ("-c", "import time; time.sleep(60)"), "start_timeout": 1.0}, "within 1 s"),
        ({"url": "http://127.0.0.1:1/mcp"}, "127.0.0.1:1/mcp gave no tools"),
        ({**STDIO, "functions": ("ad",)}, "did you mean 'add'"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_serve_is_named(settings, facts):
    tool = Mcp(McpConfig(name="mcp", **settings), PluginContext())
    with pytest.raises(PluginBrokenError) as caught:
        tool.start()
    assert facts in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"command": "a", "url": "http://b"}])
def test_command_and_address_exclude_each_other(settings):
    with pytest.raises(ConfigError, match="expected one of them"):
        Mcp(McpConfig(name="mcp", **settings), PluginContext())
