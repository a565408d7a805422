"""The examples in docs/tools.md work unchanged."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.errors import ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall
from dovetail.plugins import make_plugin, ref_for
from dovetail.plugins.index import default_index
from dovetail.plugins.load import config_class
from dovetail.sections import PluginSection
from dovetail_agents import ToolSet

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_settings_of_the_first_config_are_those_of_the_tools():
    [first, *_] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    loop = yaml.safe_load(first)["rollout"]["agent_loop"]
    assert config_class("tool_parser", {"name": loop["parser"]})
    sections = [{"name": one} if isinstance(one, str) else one for one in loop["tools"]]
    for section in sections[:-1]:
        assert config_class("tool", section)(**section).name == section["name"]
    assert sections[-1].keys() == {"path", "attribute"}


def test_the_class_that_it_shows_is_a_tool(tmp_path):
    [code] = re.findall(r"```python\n# counter.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "counter.py").write_text(code)
    section = PluginSection(path=str(tmp_path / "counter.py"), attribute="Counter")
    tool: Any = make_plugin(ref_for("tool", section), PluginContext())

    async def run() -> list[Any]:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
            results = []
            for amount in (4, 6):
                call = ToolCall(id="c", name="add", arguments={"amount": amount})
                results.append(await tools.call(call))
            with pytest.raises(ToolError, match="negative"):
                await tools.call(ToolCall(id="c", name="add", arguments={"amount": -1}))
        return [(result.content, result.reward, result.done) for result in results]

    assert asyncio.run(run()) == [("4", 0.1, False), ("10", 0.1, True)]


@pytest.mark.parametrize("kind", ["tool", "tool_parser"])
def test_its_tables_name_every_tool_and_parser(kind):
    installed = {
        entry.name
        for entry in default_index().entries(kind)
        if entry.distribution in ("dovetail-tools", "dovetail-rewards")
    }
    rows = set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
    assert installed
    assert installed <= rows
