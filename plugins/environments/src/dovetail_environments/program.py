"""ProgramEnvironment: a user's environment, as a Python file or any command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail_environments import worker
from dovetail_environments.config import ProgramEnvironmentConfig
from dovetail_environments.worker_environment import WorkerEnvironment


class ProgramEnvironment(WorkerEnvironment):
    """A user's environment program, run in a separate interpreter or container.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {rooms: {name: program, file: rooms.py, python: .venv-rooms/bin/python}}
    """

    name = "program"
    api = ">=1.0,<2"
    Config = ProgramEnvironmentConfig

    def words(self) -> Sequence[str]:
        if self.config.command is not None:
            return shlex.split(self.config.command)
        file = Path(self.config.file).absolute()
        if not file.is_file():
            raise ConfigError(
                f"environment {self.context.role!r}: the file {self.config.file!r} does not exist (working directory {Path.cwd()})",
                hint=f"set rollout.agent_loop.environments.{self.context.role}.file to an existing Python file",
            )
        return (*self.python(), worker.__file__, str(file))

    def settings(self) -> Mapping[str, Any]:
        return {"seed": self.context.seed, **self.config.settings}
