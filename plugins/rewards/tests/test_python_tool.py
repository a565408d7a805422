"""The tool `python` passes the conformance suite of tools, and ends its programs."""

from __future__ import annotations

import asyncio
import time

import pytest

from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall
from dovetail_agents import ToolSet
from dovetail_rewards.config_code import PythonToolConfig
from dovetail_rewards.python_tool import PythonTool
from dovetail_rewards.sandbox import available_levels
from dovetail_sdk.testing.conformance import ToolConformance

pytestmark = pytest.mark.skipif(
    not any(level.available for level in available_levels()[:2]),
    reason="neither namespaces nor bubblewrap work here",
)


class TestPython(ToolConformance):
    plugin = PythonTool
    config = PythonToolConfig(name="python", time_limit=1.0, output_kb=4)
    calls = (
        ("python", {"code": "print(6 * 7)"}, "42"),
        ("python", {"code": "x = 1"}, "printed nothing"),
        ("python", {"code": "print('before')\n1 / 0"}, "ZeroDivisionError"),
    )
    refused = (
        ("python", {"code": "while True: pass"}, "more than 1 s of CPU"),
        ("python", {"code": "print('x' * 10000)"}, "more than 4 KiB"),
        ("python", {"code": "import os; os.abort()"}, "signal 6"),
    )
    hanging = ("python", {"code": "import time; time.sleep(60)"})


def test_a_cancelled_program_is_gone():
    tool = PythonTool(PythonToolConfig(name="python", time_limit=20.0), PluginContext())
    tool.start()

    async def run() -> None:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
            code = "import time; time.sleep(59.125)"
            call = tools.call(ToolCall(id="c", name="python", arguments={"code": code}))
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 1.0)
            assert time.monotonic() - began < 10

    asyncio.run(run())
    assert tool._runner is not None
    assert not tool._runner._under_way
    tool.close()


def test_programs_of_one_turn_run_at_once():
    tool = PythonTool(PythonToolConfig(name="python"), PluginContext())
    tool.start()

    async def run() -> float:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
            code = {"code": "import time; time.sleep(2)"}
            began = time.monotonic()
            await asyncio.gather(
                *(tools.call(ToolCall(id=str(i), name="python", arguments=code)) for i in range(8))
            )
            return time.monotonic() - began

    assert asyncio.run(run()) < 12
    tool.close()
