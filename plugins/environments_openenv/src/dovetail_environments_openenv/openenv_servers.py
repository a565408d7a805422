"""OpenEnv: environments behind OpenEnv's servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail_environments import WorkerEnvironment
from dovetail_environments_openenv.config import OpenEnvConfig


class OpenEnv(WorkerEnvironment):
    """Runs an environment of OpenEnv: the policy's turns are actions, and the observations are shown to the policy.

    Training tasks come from the split of type `train` in the environment's task API, held-out tasks from the first other split.
    If there is no other split, held-out tasks are those after the training tasks. An environment without a task API is reset with
    seeds instead. An action that the environment refuses is answered with the reason, and counts as a turn. The reward components
    are `turns` and `invalid` (the number of refused actions).

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {words: {name: openenv, project: word_env, python: .venv-openenv/bin/python}}
    """

    name = "openenv"
    api = ">=1.0,<2"
    Config = OpenEnvConfig
    file = Path(__file__).with_name("steps.py")
    requires = ("openenv>=0.10,<0.11", "uv")

    def settings(self) -> Mapping[str, Any]:
        shared = {"tasks": self.config.tasks, "at_limit": self.config.at_limit}
        return {**super().settings(), **shared}
