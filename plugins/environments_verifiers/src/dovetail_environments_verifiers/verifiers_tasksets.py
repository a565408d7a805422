"""Verifiers: an environment of verifiers 0.4's tasksets, run by verifiers' harnesses and runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail_environments import WorkerEnvironment
from dovetail_environments_verifiers.config import VerifiersConfig


class Verifiers(WorkerEnvironment):
    """Runs a taskset of verifiers: the harness calls the policy, and the taskset's rewards score the episode.

    The reward is the sum of the weighted rewards of the episode's traces. The reward components are each reward by name, the traces'
    metrics and `turns`. An episode in which verifiers records an error fails.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {maths: {name: verifiers, taskset: gsm8k-v1, harness: "null", python: .venv-verifiers/bin/python}}
    """

    name = "verifiers"
    api = ">=1.0,<2"
    Config = VerifiersConfig
    file = Path(__file__).with_name("tasksets.py")
    requires = ("verifiers>=0.4,<0.5", "uv")

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "tasks": self.config.tasks}
