"""The conformance suites of this package's plugins, for its tests and for `dovetail plugins check`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dovetail_environments.config import EnvironmentsConfig, ProgramEnvironmentConfig
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.program import ProgramEnvironment
from dovetail_environments.testing import EnvironmentConformance
from dovetail_sdk.testing.conformance import AgentLoopConformance

_FILE = Path(__file__).with_name("example.py")


class TestProgramEnvironment(EnvironmentConformance):
    """Conformance suite of the environment `program` with this package's example file."""

    plugin = ProgramEnvironment

    def make_config(self) -> Any:
        return ProgramEnvironmentConfig(name="program", file=str(_FILE), workers=2)

    def solution(self, task: Any) -> list[str]:
        return [str(number + 1) for number in range(task.ground_truth)]


class TestEnvironmentsLoop(AgentLoopConformance):
    """Conformance suite of the agent loop `environments` with the example environment."""

    plugin = EnvironmentsLoop
    turns = ("1", "two")
    row: ClassVar[Mapping[str, Any]] = {
        "extra_info": {"environment": "counting", "task": {"to": 2}}
    }

    def make_config(self) -> Any:
        counting = ProgramEnvironmentConfig(name="program", file=str(_FILE), workers=2)
        return EnvironmentsConfig(name="environments", environments={"counting": counting})
