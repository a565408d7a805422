"""Calls are compared with schemas before they run; tools that are wrong are refused; functions of files are tools."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dovetail.errors import PluginBrokenError, ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolCall, ToolResult, ToolSet
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection

NUMBER = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "tenth": {"type": "number", "multipleOf": 0.1},
    },
    "required": ["n"],
}


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def schema(name: str = "double", parameters: Any = NUMBER) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Double(Tool):
    name = "double"
    api = ">=1.0,<2"
    offered: Any = (schema(),)
    answer: Any = None

    def __init__(self) -> None:
        super().__init__(PluginSection(name="double"), PluginContext())
        self.released: list[Any] = []

    def schemas(self):
        return self.offered

    async def open(self, episode):
        return episode.sample_id

    async def call(self, state, name, arguments):
        return self.answer or ToolResult(content=f"{state}: {2 * arguments['n']}")

    async def release(self, state):
        self.released.append(state)


def called(tool: Tool, name: str = "double", /, **arguments: Any) -> ToolResult:
    async def run() -> ToolResult:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s7")) as tools:
            return await tools.call(ToolCall(id="c", name=name, arguments=arguments))

    return asyncio.run(run())


def test_a_call_gets_the_state_of_its_episode_which_is_released_afterwards():
    tool = Double()
    assert called(tool, n=4).content == "s7: 8"
    assert tool.released == ["s7"]


def test_the_state_is_released_where_a_call_fails():
    tool = Double()
    with pytest.raises(ToolError):
        called(tool, n="four")
    assert tool.released == ["s7"]


@pytest.mark.parametrize(
    ("name", "arguments", "facts"),
    [
        ("doubel", {"n": 1}, ("'doubel'", "there are: double", "did you mean 'double'?")),
        ("double", {}, ("'double'", "'n' is a required property")),
        ("double", {"n": "x" * 10_000}, ("n: ",)),
        ("double", {"n": True}, ("n: ", "'integer'")),
        ("double", {"n": 3.0}, ("n: ", "'integer'")),
        ("double", {"n": 1, "list": ["x"] * 100_000}, ("list.0: ",)),
        ("double", {"n": 1, "tenth": 10**400}, ("too large",)),
        ("double", {"n": 1, "more": float("inf")}, ("'double'", "not finite")),
        ("double", {"n": 1, "more": "\ud800"}, ("'double'", "surrogate")),
        ("double", {"n": 1, "more": nested(101)}, ("'double'", "100 levels")),
        ("double", {"n": 1, "more": nested(5000)}, ("'double'", "nested")),
        ("x" * 10_000_000, {}, ("there are: double",)),
    ],
)
def test_a_wrong_call_is_an_error_that_the_policy_can_act_on(name, arguments, facts):
    with pytest.raises(ToolError) as caught:
        called(Double(), name, **arguments)
    assert all(fact in str(caught.value) for fact in facts)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("offered", "facts"),
    [
        (("double",), "names no function"),
        (({"type": "function", "function": {"parameters": NUMBER}},), "names no function"),
        ((schema(parameters={"type": "objekt"}),), "'objekt'"),
        ((schema(parameters={"type": "array"}),), "expected the schema of an object"),
        ((schema(), schema()), "both have a function 'double'"),
    ],
)
def test_a_wrong_schema_is_refused_with_tool_and_function(offered, facts):
    tool = Double()
    tool.offered = offered
    with pytest.raises(PluginBrokenError, match="double") as caught:
        ToolSet([tool])
    assert facts in str(caught.value)


def test_a_function_without_parameters_may_leave_its_schema_out():
    tool = Double()
    tool.offered = (schema(parameters=None),)
    tool.answer = ToolResult(content="7")
    assert called(tool).content == "7"


def test_a_schema_is_never_fetched_from_the_network():
    tool = Double()
    tool.offered = (schema(parameters={"type": "object", "$ref": "http://127.0.0.1:1/schema"}),)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1/schema") as caught:
        called(tool, n=1)
    assert "Unresolvable" in repr(caught.value)


def test_an_answer_that_is_no_result_names_tool_and_function():
    tool = Double()
    tool.answer = "8"
    with pytest.raises(TypeError, match="tool 'double' returned 8 from 'double'"):
        called(tool, n=4)


@pytest.mark.parametrize("content", [None, 8, ["text"], {"type": "text"}])
def test_a_result_without_text_or_parts_is_refused(content):
    with pytest.raises(TypeError, match="expected text or a list"):
        ToolResult(content=content)


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="nan"):
        ToolResult(content="", reward=float("nan"))


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
    """Return what is no JSON."""
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
    with pytest.raises(PluginBrokenError, match="'untyped' can't be a tool") as caught:
        function("untyped")
    assert "Args:" in str(caught.value)
