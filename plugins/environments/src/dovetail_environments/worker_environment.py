"""WorkerEnvironment: an environment whose code runs in a separate interpreter and calls the policy by an API."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from dovetail.interfaces import EpisodeError, FailureKind, PluginConfig, PluginContext
from dovetail_environments import worker as worker_program
from dovetail_environments.config import WorkerSection
from dovetail_environments.environment import (
    Environment,
    EnvironmentEpisode,
    EnvironmentTask,
    EpisodeScore,
)
from dovetail_environments.worker_pool import (
    EnvironmentProcess,
    EnvironmentProcessError,
    WorkerCommand,
    WorkerPool,
)


class WorkerEnvironment(Environment):
    """Runs `tasks` and `episode` of a file in processes of the configured interpreter; `worker.py` documents both functions.

    A subclass names the file and its requirements. The subclass's Config extends WorkerSection; the additional fields are passed to the
    file as settings.
    """

    file: ClassVar[Path]
    """The file with the functions `tasks` and `episode`, which imports nothing of Dovetail."""
    requires: ClassVar[Sequence[str]] = ()
    """Packages that the interpreter needs, as requirements: `("textarena>=0.7,<0.8",)`."""
    Config = WorkerSection

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._pool: WorkerPool | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def words(self) -> Sequence[str]:
        """Return the command that starts a worker process.

        Raises:
            ConfigError: the config names no usable command.
        """
        return (*self.python(), worker_program.__file__, str(self.file))

    def settings(self) -> Mapping[str, Any]:
        """Return the settings for the file: the run's seed, and the config fields that are not WorkerSection's."""
        shared = attrs.fields_dict(WorkerSection)
        own = attrs.asdict(self.config, filter=lambda field, _: field.name not in shared)
        return {"seed": self.context.seed, **own}

    def python(self) -> Sequence[str]:
        """Return the command that starts the Python interpreter."""
        return shlex.split(self.config.python or sys.executable)

    def tasks(self, count: int, *, held_out: bool) -> Sequence[EnvironmentTask]:
        answer = self.pool().ask_once({"do": "tasks", "count": count, "held_out": held_out})
        if "error" in answer:
            raise EnvironmentProcessError(f"{self._title} failed in `tasks`: {answer['error']}")
        try:
            return [
                EnvironmentTask(prompt=each["prompt"], data=each.get("task") or {}, ground_truth=each.get("ground_truth"))
                for each in answer["tasks"]
            ]  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            message = f"{self._title} returned an invalid task: {type(error).__name__}: {error}"
            raise EnvironmentProcessError(
                message, hint="return tasks as mappings with `prompt` and `task`"
            ) from error

    async def run(self, task: Mapping[str, Any], episode: EnvironmentEpisode) -> EpisodeScore:
        pool = self.pool()
        try:
            async with pool.worker() as worker, episode.served() as model:
                asked = {"base_url": model.base_url, "api_key": model.api_key, "name": model.name}
                asking = self._answer(pool, worker, {"do": "episode", "task": task, "model": asked})
                answer = await model.asked_by(asking, self.config.episode_seconds)
        except EnvironmentProcessError as error:
            raise EpisodeError(FailureKind.ENVIRONMENT, str(error), hint=error.hint) from error
        return EpisodeScore(reward=answer["reward"], parts=answer.get("parts") or {})

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def pool(self) -> WorkerPool:
        """Return the pool of worker processes, which start on demand."""
        if self._pool is None:
            name = self.context.role or type(self).name
            if self.context.run_directory is None and self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="dovetail-environment-")
            base = self.context.run_directory or Path(self._folder.name if self._folder else ".")
            command = WorkerCommand(
                title=self._title,
                words=self.words(),
                requires=self.requires,
                settings=self.settings(),
                start_seconds=self.config.start_seconds,
                log=base / "environments" / f"{name}.log",
            )
            self._pool = WorkerPool(command, self.config.workers)
        return self._pool

    @property
    def _title(self) -> str:
        return f"environment {self.context.role or type(self).name!r}"

    async def _answer(
        self, pool: WorkerPool, worker: EnvironmentProcess, request: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Send a request for an episode to a process, and return the answer.

        Raises:
            EpisodeError: the answer has no reward.
        """
        answer = await pool.ask(worker, request)
        if "reward" not in answer:
            what = answer.get("error", f"its answer {answer!r:.200} has no `reward`")
            raise EpisodeError(FailureKind.ENVIRONMENT, f"{self._title} failed: {what}")
        return answer
