"""Calls are checked against schemas before they run; invalid tools are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.errors import PluginBrokenError, ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolCall, ToolResult
from dovetail.sections import PluginSection
from dovetail_agents import ToolSet

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
    api = ">=2.0,<3"
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
        ("doubel", {"n": 1}, ("'doubel'", "expected one of: double", "did you mean 'double'?")),
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
        ("x" * 10_000_000, {}, ("expected one of: double",)),
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
        ((schema(parameters={"type": "array"}),), "expected the schema"),
        ((schema(), schema()), "have a function 'double'"),
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
    with pytest.raises(TypeError, match="expected text"):
        ToolResult(content=content)


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="nan"):
        ToolResult(content="", reward=float("nan"))
