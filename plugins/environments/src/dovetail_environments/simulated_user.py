"""SimulatedUser: an environment in which a second model plays the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail_environments.config import SimulatedUserConfig
from dovetail_environments.worker_environment import WorkerEnvironment


class SimulatedUser(WorkerEnvironment):
    """Environment in which a second model, behind an endpoint, plays a user who talks with the policy.

    The user's messages are not trained on.

    The reward is 1 if the user is satisfied, else 0. In a task with an `answer`, the reward is 1 if the policy's last message contains the
    answer. The reward components are `satisfied` and `turns`.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {support: {name: simulated_user, file: users.jsonl, url: "http://127.0.0.1:8000/v1", model: user}}
    """

    name = "simulated_user"
    api = ">=1.0,<2"
    Config = SimulatedUserConfig
    file = Path(__file__).with_name("user.py")

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "tasks": self.config.tasks}
