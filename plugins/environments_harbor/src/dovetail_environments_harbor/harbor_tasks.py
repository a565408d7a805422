"""Harbor: an environment whose tasks are folders with an instruction, an environment and tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail_environments import WorkerEnvironment
from dovetail_environments_harbor.config import HarborConfig


class Harbor(WorkerEnvironment):
    """Runs tasks of Harbor: the policy works in a shell, and the task's tests score the final state.

    The reward is the tests' `reward`; the tests' other rewards and `turns` are reward components. At a limit on turns or tokens, the tests
    score the state reached, if they take less than 5 seconds; else the reward is `at_limit`. An episode in which Harbor records an error
    fails.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {terminal: {name: harbor, folder: tasks, runtime: podman, python: .venv-harbor/bin/python}}
    """

    name = "harbor"
    api = ">=1.0,<2"
    Config = HarborConfig
    file = Path(__file__).with_name("trials.py")
    requires = ("harbor>=0.26,<0.27",)

    def settings(self) -> Mapping[str, Any]:
        sandbox = [sys.executable, str(Path(__file__).with_name("sandbox_process.py"))]
        return {**super().settings(), "tasks": self.config.tasks, "sandbox": sandbox}
