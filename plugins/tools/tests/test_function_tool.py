"""Functions of files as tools."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dovetail.errors import PluginBrokenError, ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolCall, ToolResult
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_agents import ToolSet


def called(tool: Tool, name: str, /, **arguments: Any) -> ToolResult:
    async def run() -> ToolResult:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s7")) as tools:
            return await tools.call(ToolCall(id="c", name=name, arguments=arguments))

    return asyncio.run(run())


FILE = '''
import asyncio, threading, time
from dovetail.errors import ToolError
from dovetail.interfaces import ToolResult

release = threading.Event()

def add(a: int, b: int = 1):
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    if a < 0:
        raise ToolError("a is negative")
    return a + b

async def greet(name: str):
    """
    Greet somebody.

    Args:
        name: Who.
    """
    await asyncio.sleep(0)
    return ToolResult(content=f"Hello {name}", reward=0.5, done=True)

def wait():
    """Wait until the test says so."""
    release.wait(20)

def power(a: int, b: int):
    """
    Raise a number to a power.

    Args:
        a: The number.
        b: The power.
    """
    return a**b

def thing():
    """Return what is not JSON."""
    return object()

def untyped(a):
    """
    Add one.

    Args:
        a: The first.
    """
'''


@pytest.fixture
def function(tmp_path):
    (tmp_path / "functions.py").write_text(FILE)

    def load(attribute: str) -> Tool:
        section = PluginSection(path=str(tmp_path / "functions.py"), attribute=attribute)
        return make_plugin(ref_for("tool", section), PluginContext())

    return load


def test_a_function_of_a_file_is_a_tool_with_the_schema_of_its_signature(function):
    [found] = function("add").schemas()
    assert found["function"]["name"] == "add"
    assert found["function"]["parameters"]["required"] == ["a"]
    assert found["function"]["parameters"]["properties"]["b"]["description"] == "The second."


def test_it_is_called_with_its_arguments_and_its_value_is_shown_as_json(function):
    assert called(function("add"), "add", a=2).content == "3"
    assert called(function("greet"), "greet", name="Ada") == ToolResult(
        content="Hello Ada", reward=0.5, done=True
    )


def test_its_errors_and_values_that_are_no_json_are_raised_as_they_are(function):
    with pytest.raises(ToolError, match="a is negative"):
        called(function("add"), "add", a=-1)
    with pytest.raises(TypeError, match="'thing' returned object"):
        called(function("thing"), "thing")


@pytest.mark.parametrize(
    ("name", "arguments", "facts"),
    [
        ("add", {"a": 1, "c": 2}, ("'c'", "a, b")),
        ("add", {"a": 1, "self": 2, "\x00": 3}, ("'self'",)),
        ("wait", {"seconds": 1}, ("'seconds'", "none")),
        ("power", {"a": 10, "b": 5000}, ("digits",)),
    ],
)
def test_arguments_that_it_does_not_have_and_results_without_end_are_the_policys(
    function, name, arguments, facts
):
    with pytest.raises(ToolError) as caught:
        called(function(name), name, **arguments)
    assert all(fact in str(caught.value) for fact in facts)


def test_a_function_that_hangs_stops_neither_the_loop_nor_other_calls(function):
    wait, add = function("wait"), function("add")

    async def run() -> str:
        async with ToolSet([wait, add]).open(EpisodeInfo(sample_id="s")) as tools:
            hanging = [
                asyncio.create_task(tools.call(ToolCall(id=str(i), name="wait", arguments={})))
                for i in range(40)  # more than the loop's own pool has threads
            ]
            await asyncio.sleep(0.1)
            done = await asyncio.wait_for(
                tools.call(ToolCall(id="a", name="add", arguments={"a": 1})), 5
            )
            for task in hanging:
                task.cancel()
            ended = await asyncio.wait_for(asyncio.gather(*hanging, return_exceptions=True), 5)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended)
            return str(done.content)

    try:
        assert asyncio.run(run()) == "2"
        assert sum(thread.name == "tool-wait" for thread in threading.enumerate()) == 40
    finally:
        wait.function.__globals__["release"].set()


def test_a_function_without_types_is_refused_with_what_to_write(function):
    with pytest.raises(PluginBrokenError, match="'untyped'") as caught:
        function("untyped")
    assert "Args:" in str(caught.value)
