"""Mcp over a real server of the official SDK, on standard input and output and on HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'dovetail-tools[mcp]'")

from dovetail.errors import ConfigError, PluginBrokenError, ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall
from dovetail_agents import OpenTools, ToolSet
from dovetail_sdk.testing.conformance import ToolConformance
from dovetail_tools.config import McpConfig
from dovetail_tools.mcp import Mcp, _crashed

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
        ("my_pid", {}, "does not exist"),
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
        assert {"add", "wait"} <= {one["function"]["name"] for one in tool.schemas()}
        assert asyncio.run(tool.call(None, "add", {"a": 1, "b": 1})).content == "2"
        tool.close()


@contextmanager
def started(**settings: Any) -> Iterator[Mcp]:
    tool = Mcp(McpConfig(name="mcp", **{**STDIO, **settings}), PluginContext())
    try:
        tool.start()
        yield tool
    finally:
        tool.close()


async def called(tools: OpenTools, name: str, **arguments: Any) -> str:
    return str((await tools.call(ToolCall(id="c", name=name, arguments=arguments))).content)


def gone(server: int) -> bool:
    """Wait until a process has ended."""
    for _ in range(2000):
        try:
            os.kill(server, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_an_episode_has_a_server_of_its_own_which_ends_with_it():
    pages: dict[str, str] = {}
    servers: list[int] = []
    running: list[str] = []

    async def episode(tool: Mcp, name: str) -> None:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id=name)) as tools:
            servers.append(int(await called(tools, "pid")))
            running.append(name)
            assert len(running) <= 2
            await called(tools, "goto", page=name)
            await asyncio.sleep(0.1)
            pages[name] = await called(tools, "goto")
            running.remove(name)

    async def run(tool: Mcp) -> None:
        await asyncio.gather(*(episode(tool, name) for name in "abc"))
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="d")) as tools:
            pages["d"] = await called(tools, "goto")
            await asyncio.to_thread(lambda: [gone(server) for server in servers])

    with started(max_connections=2) as tool:
        asyncio.run(run(tool))
        assert pages == {"a": "a", "b": "b", "c": "c", "d": "nowhere"}
        assert len(set(servers)) == 3
        assert all(map(gone, servers))


@pytest.mark.nightly
def test_an_episode_that_waits_for_a_place_and_is_cancelled_takes_none():
    async def run(tool: Mcp) -> None:
        episodes = ToolSet([tool])
        async with episodes.open(EpisodeInfo(sample_id="a")):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), episodes.open(EpisodeInfo(sample_id="b")):
                    pass
        async with asyncio.timeout(60), episodes.open(EpisodeInfo(sample_id="b")) as tools:
            assert await called(tools, "add", a=1, b=1) == "2"

    with started(max_connections=1) as tool:
        asyncio.run(run(tool))


def test_a_server_that_dies_fails_its_episode_and_the_next_has_another():
    async def run(tool: Mcp) -> None:
        for _ in range(2):
            async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
                assert await called(tools, "add", a=1, b=1) == "2"
                for name in ("die", "pid"):
                    with pytest.raises(ConnectionError, match="ended"):
                        await called(tools, name)

    with started() as tool:
        asyncio.run(run(tool))


def test_a_shared_server_has_one_state_is_started_again_where_it_dies_and_ends_with_the_tool():
    async def run(tool: Mcp) -> int:
        both = ToolSet([tool])
        async with (
            both.open(EpisodeInfo(sample_id="a")) as a,
            both.open(EpisodeInfo(sample_id="b")) as b,
        ):
            await called(a, "goto", page="x")
            assert await called(b, "goto") == "x"
            with pytest.raises(ConnectionError, match="ended"):
                await called(a, "die")
            answers = await asyncio.gather(*(called(tools, "pid") for tools in (a, b, a, b)))
            [server] = set(answers)
            os.kill(int(server), signal.SIGKILL)
            assert await called(b, "pid") != server
            return int(await called(a, "pid"))

    with started(shared=True) as tool:
        server = asyncio.run(run(tool))
        os.kill(server, 0)
    assert gone(server)


def test_an_error_of_the_server_is_shown_or_fails_as_the_config_says():
    async def run(tool: Mcp, fails: set[str]) -> None:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
            for name, arguments in CALLS.items():
                with pytest.raises(RuntimeError, match=name) as caught:
                    await called(tools, name, **arguments)
                assert isinstance(caught.value, ToolError) is (name not in fails)

    CALLS = {"fail": {"why": "no such file"}, "crash": {"why": "the database is down"}}
    with started(shared=True) as tool:
        asyncio.run(run(tool, {"crash"}))
        for fail_on, fails in (("error", {"crash", "fail"}), ("never", set())):
            tool.config = attrs.evolve(tool.config, fail_on=fail_on)
            asyncio.run(run(tool, fails))


@pytest.mark.parametrize(
    ("text", "crashed"),
    [
        ("Error executing tool f", True),
        ("Error executing tool f: Error executing tool g", True),
        ("Error executing tool f: Error reading resource file:///a", True),
        ("Error executing tool f: no such file", False),
        ("Error executing tool g", False),
        ("Error executing tool f\nno such file", False),
        ("Unknown tool: f", False),
        ("", False),
    ],
)
def test_a_tool_that_crashed_is_known_by_what_the_sdk_says(text, crashed):
    assert _crashed("f", text) is crashed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"command": "no-such-program"}, "no-such-program did not list its tools"),
        ({"command": sys.executable, "args": ("-c", "raise SystemExit(3)")}, "did not list its tools"),
        ({"command": sys.executable, "args": ("-c", "import time; time.sleep(60)"), "start_timeout": 1.0}, "within 1 s"),
        ({"url": "http://127.0.0.1:1/mcp"}, "127.0.0.1:1/mcp did not list its tools"),
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
    with pytest.raises(ConfigError, match=r"command.*url"):
        Mcp(McpConfig(name="mcp", **settings), PluginContext())
