"""Tools that were written for verl run unchanged, without verl."""

from __future__ import annotations

import asyncio
import sys
import textwrap

import pytest

pytest.importorskip("dovetail_verl_shim", reason="dovetail-verl-shim is not installed")

from dovetail.errors import ConfigError, PluginBrokenError, ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall
from dovetail_agents import ToolSet
from dovetail_sdk.check.shipping import NotHereError
from dovetail_sdk.check.suites import suites_for
from dovetail_tools.config import VerlConfig
from dovetail_tools.verl import Verl

TOOLS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Guess(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.kept = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self.kept[instance_id] = [ground_truth, 0]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        state = self.kept[instance_id]
        state[1] += 1
        right = parameters["answer"] == state[0]
        return ToolResponse(text=f"try {state[1]}: {right}{kwargs.get('mark', '')}"), float(right), {}

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0

    async def release(self, instance_id, **kwargs):
        del self.kept[instance_id]

class Old(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "old", "description": "", "parameters":
             {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}, "required": []}}})

    async def create(self, instance_id=None):
        return instance_id

    async def execute(self, instance_id, parameters):
        return "text", 0.5, {}

class Broken(BaseTool):
    def __init__(self, config, tool_schema):
        raise RuntimeError("no luck")
"""
CONFIG = """
tools:
  - class_name: {module}.Guess
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: guess
        description: Guess.
        parameters:
          type: object
          properties: {{answer: {{type: string, description: The answer.}}}}
          required: [answer]
  - class_name: {module}.Old
    config: {{}}
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "verl_style_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verl_style_tools", raising=False)

    def tool(config: str = CONFIG) -> Verl:
        file = tmp_path / "tools.yaml"
        file.write_text(textwrap.dedent(config).format(module="verl_style_tools"))
        made = Verl(VerlConfig(name="verl", tools_config=str(file)), PluginContext())
        made.start()
        return made

    return tool


def test_they_keep_their_state_through_an_episode_and_get_the_rows_arguments(make):
    tool = make()
    rows = {"guess": {"create_kwargs": {"ground_truth": "7"}, "execute_kwargs": {"mark": "!"}}}

    async def run():
        tools = ToolSet([tool])
        info = EpisodeInfo(sample_id="s", extra_info={"tools_kwargs": rows})
        async with tools.open(info) as first, tools.open(EpisodeInfo(sample_id="t")) as second:
            results = []
            for opened, answer in ((first, "6"), (first, "7"), (second, "7")):
                call = ToolCall(id="c", name="guess", arguments={"answer": answer})
                results.append(await opened.call(call))
            results.append(await first.call(ToolCall(id="c", name="old", arguments={"x": None})))
            with pytest.raises(ToolError, match="required"):
                await first.call(ToolCall(id="c", name="guess", arguments={}))
        return [(result.content, result.reward) for result in results]

    assert asyncio.run(run()) == [("try 1: False!", 0.0), ("try 2: True!", 1.0), ("try 1: False", 0.0), ("text", 0.5)]  # fmt: skip
    assert tool._tools["guess"].kept == {}


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ("tools:\n- class_name: {module}.Broken\n  config: {{}}", "no luck"),
        ("tools:\n- class_name: {module}.Gues\n  config: {{}}", "no attribute 'Gues'"),
        ("tools:\n- class_name: absent_module.X", "PYTHONPATH"),
        ("tools:\n- class_name: verl.tools.gsm8k_tool.Gsm8kTool", "install verl"),
        ("tools:\n- class_name: {module}.Old\n  config: {{type: mcp}}", "expected 'native'"),
        ("tools:\n- {{}}", "a mapping with class_name"),
        ("[]", "tools file"),
        ("tools: [", "tools file"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(make, config, facts):
    with pytest.raises(PluginBrokenError, match=r"tools\.yaml") as caught:
        make(config)
    assert facts in str(caught.value)


def test_a_plain_check_asks_for_the_settings_that_the_suite_needs():
    with pytest.raises(NotHereError, match="tools_config: required") as caught:
        suites_for(Verl, "tool", "dovetail_tools")
    assert "plugins check tool/verl KEY=VALUE" in caught.value.hint
    with pytest.raises(ConfigError, match="tools_confg"):
        suites_for(Verl, "tool", "dovetail_tools", ["tools_confg=a.yaml"])
