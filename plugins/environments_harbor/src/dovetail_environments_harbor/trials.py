"""Runs Harbor's tasks. `worker.py` of dovetail-environments runs this file in an interpreter with Harbor, without Dovetail."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

_RUNNER = asyncio.Runner()
_UNLIMITED = 1e6
"""Factor by which Harbor's time limit for an agent is raised, so that only the run's limits apply; these don't count the policy's time."""
_HOUR, _MIB = 3600, 1 << 20


def tasks(settings: dict[str, Any], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return the folder's first tasks in order of their names, or with `held_out` the tasks after the training tasks.

    Raises:
        ValueError: there are no tasks, or a task has several steps.
    """
    path, first = Path(settings["folder"]), settings["tasks"] if held_out else 0
    one = (path / "task.toml").is_file()
    folders = [path] if one else sorted(each.parent for each in path.glob("*/task.toml"))
    if not folders:
        raise ValueError(f"folder {str(path)!r} holds no Harbor task; expected a task.toml in it or in folders directly below it")  # fmt: skip
    found = []
    for folder in folders[first : first + count]:
        task = Task(folder)
        if task.has_steps:
            raise ValueError(f"the Harbor task {folder} has several steps, which are not supported; expected a single instruction")  # fmt: skip
        prompt = _begin(settings, task.instruction)
        found.append({"prompt": prompt, "task": {"folder": str(folder.resolve())}})
    return found


def episode(settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    """Let the policy work on a task, and return the `reward` of the task's tests and the reward components `parts`.

    Raises:
        RuntimeError: Harbor recorded an error.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-harbor-") as folder:
        PolicyAgent.model, PolicyAgent.settings, PolicyAgent.turns = model, settings, 0
        SandboxRuntime.command = settings["sandbox"]
        own = settings["runtime"] == "sandbox"
        place: dict[str, Any] = {"import_path": "environment:SandboxRuntime"} if own else {"type": settings["runtime"]}  # fmt: skip
        config = TrialConfig(
            task=TaskConfig(path=Path(task["folder"])),
            trials_dir=Path(folder),
            agent=AgentConfig(import_path="environment:PolicyAgent"),
            agent_timeout_multiplier=_UNLIMITED,
            environment=EnvironmentConfig(**place, kwargs=settings["runtime_config"]),
        )
        result = _RUNNER.run(_ran(config))
    error = result.exception_info
    if error is not None:
        raise RuntimeError(
            f"Harbor's trial failed: {error.exception_type}: {error.exception_message}"
        )
    rewards = dict(result.verifier_result.rewards or {})
    reward = rewards.pop("reward", None)
    if reward is None:
        raise RuntimeError(f"the task's tests wrote the rewards {rewards}; expected a key `reward`")
    return {"reward": reward, "parts": {**rewards, "turns": PolicyAgent.turns}}


async def _ran(config: TrialConfig) -> Any:
    return await (await Trial.create(config)).run()


def _begin(settings: dict[str, Any], instruction: str) -> list[dict[str, str]]:
    system = settings["instruction"]
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": instruction}]


class PolicyAgent(BaseAgent):  # type: ignore[misc]
    """An agent for Harbor that runs the last block of shell commands in each of the policy's answers, until an answer has no block."""

    model: Any
    settings: dict[str, Any]
    turns = 0

    @staticmethod
    def name() -> str:
        """Return the name that Harbor uses."""
        return "policy"

    def version(self) -> str:
        """Return the version that Harbor records."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: the agent needs no set-up in the environment."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        """Work on a task until the policy has finished, or has reached the limit of turns or tokens."""
        cls, limit = type(self), self.settings["command_seconds"]
        messages = _begin(self.settings, instruction)
        while True:
            try:
                said = await asyncio.to_thread(self.model.chat, messages)
            except self.model.Ended:
                return
            cls.turns += 1
            blocks = re.findall(r"```(?:bash|sh|shell)\n(.*?)```", said, re.DOTALL)
            if not blocks:
                return
            try:
                result = await environment.exec(blocks[-1], timeout_sec=limit)
                shown = f"{result.stdout or ''}{result.stderr or ''}"
                shown = f"{self._cut(shown)}\n[exit status {result.return_code}]"
            except TimeoutError:
                shown = f"[ended after {limit} s]"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]

    def _cut(self, text: str) -> str:
        most = self.settings["output_characters"]
        cut = f"{text[: most // 2]}\n[…]\n{text[-(most // 2) :]}"
        return (cut if len(text) > most else text).strip()


class SandboxRuntime(BaseEnvironment):  # type: ignore[misc]
    """A Harbor runtime without a container: a shell in the sandbox of dovetail-rewards, started by the run's own interpreter."""

    command: list[str]

    @staticmethod
    def type() -> str:
        """Return the name that Harbor uses."""
        return "sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Return the runtime's capabilities: no network."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Accept any task, since the Dockerfile is not used."""

    async def start(self, force_build: bool) -> None:
        """Start the shell, and copy the files beside the task's Dockerfile into the working directory."""
        wanted = self.task_env_config
        limits = {
            "cpu_s": _HOUR,
            "wall_s": 10 * _HOUR,
            "memory": max(wanted.memory_mb or 2048, 256) * _MIB,
            "disk": max(min(wanted.storage_mb or 1024, 1024), 16) * _MIB,
            "file_size": 256 * _MIB,
            "open_files": 512,
            "processes": 128,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            words = [*self.command, str(theirs.fileno()), json.dumps(limits)]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603 - ours  # fmt: skip
        self._socket, self._lines = ours, ours.makefile("rw", encoding="utf-8")
        await self.upload_dir(self.environment_dir, self._folder)

    async def stop(self, delete: bool) -> None:
        """End the shell, and every process that the task has started."""
        if hasattr(self, "_process"):
            self._socket.close()
            self._process.kill()
            self._process.communicate()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a local file to a path in the sandbox."""
        target = Path(target_path)
        await self._put(source_path, str(target.parent), target.name)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy the content of a local folder into a folder of the sandbox."""
        await self._put(source_dir, target_dir, ".")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file in the sandbox to a local path."""
        with await self._got(source_path) as archive:
            found = archive.extractfile(".")
            if found is None:
                raise IsADirectoryError(source_path)
            Path(target_path).write_bytes(found.read())

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the content of a folder of the sandbox into a local folder."""
        with await self._got(source_dir) as archive:
            archive.extractall(target_dir, filter="data")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command in the sandbox, always as the sandbox's own user.

        Raises:
            TimeoutError: the command was killed after `timeout_sec`.
        """
        variables = self._merge_env(env) or {}
        found = await self._ask(do="run", command=command, folder=cwd or self._folder, variables=variables, seconds=timeout_sec)  # fmt: skip
        if found["status"] is None:
            raise TimeoutError(
                f"the command {command!r:.80} took longer than {timeout_sec} s and was killed"
            )
        return ExecResult(stdout=found["out"], stderr=found["err"], return_code=found["status"])

    @property
    def _folder(self) -> str:
        return self.task_env_config.workdir or "/app"

    async def _put(self, source: Path | str, folder: str, name: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, arcname=name)
        await self._ask(do="put", data=base64.b64encode(packed.getvalue()).decode(), folder=folder)

    async def _got(self, path: str) -> tarfile.TarFile:
        found = await self._ask(do="get", path=path)
        return tarfile.open(fileobj=io.BytesIO(base64.b64decode(found["data"])))

    async def _ask(self, **request: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._asked, request)

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._lines.write(json.dumps(request) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError:
            line = ""
        if not line:
            said = self._process.communicate()[1].strip().splitlines()
            raise RuntimeError(said[-1] if said else "the sandbox has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(
                f"the request {request['do']!r} failed in the sandbox: {answer['error']}"
            )
        return answer
