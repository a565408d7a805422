"""WorkerPool: processes that run an environment in the interpreter that it needs. Each process runs one episode at a time."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
from packaging.requirements import Requirement

from dovetail.errors import DovetailError
from dovetail_environments.worker import PROTOCOL

_SHOWN = 300
"""Number of characters of a process's output that an error shows."""
_LONGEST = 64 << 20
"""Maximum length of an answer, in characters."""


class EnvironmentProcessError(DovetailError, RuntimeError):
    """A process of an environment can't be started, has died, does not answer, or violates the protocol."""


@attrs.frozen(kw_only=True)
class WorkerCommand:
    """The command that starts an environment's worker processes, with its requirements and limits."""

    title: str
    """The environment's title in messages, such as `environment 'games'`."""
    words: Sequence[str]
    """The interpreter or program, and its arguments."""
    requires: Sequence[str] = ()
    """Packages that the interpreter needs, as requirements: `textarena>=0.7,<0.8`."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """The settings of the environment, as JSON values."""
    start_seconds: float = 120.0
    """Seconds that a process may take to start."""
    log: Path
    """The log file for the output of the processes."""

    def install(self) -> str:
        """Return the command that installs the environment's requirements."""
        wanted = " ".join(shlex.quote(each) for each in self.requires) or "its packages"
        program = self.words[0]
        if Path(program).name in ("uv", "uvx"):
            given = " ".join(f"--with {shlex.quote(each)}" for each in self.requires)
            return f"add the packages to the environment's `python`: uv run {given} python"
        folder = Path(program).parent.parent
        if shutil.which(program) is None and Path(program).parent.name == "bin":
            return f"python3 -m venv {folder} && {folder}/bin/python -m pip install {wanted}"
        return f"{program} -m pip install {wanted}"


class EnvironmentProcess:
    """A worker process of an environment, with which this process exchanges JSON messages.

    Args:
        command: the command that starts the process.

    Attributes:
        busy: whether a request to the process is unanswered.

    Raises:
        EnvironmentProcessError: the process can't be started, speaks another version of the protocol, or lacks a
            package.
    """

    def __init__(self, command: WorkerCommand) -> None:
        self._command, self.busy = command, False
        command.log.parent.mkdir(parents=True, exist_ok=True)
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
        try:
            with command.log.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the config's command
                    list(command.words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    encoding="utf-8", errors="replace", start_new_session=True,
                    env={**os.environ, "NO_PROXY": direct, "no_proxy": direct},
                )  # fmt: skip
        except OSError as error:
            raise EnvironmentProcessError(
                f"{command.title} can't be started: running {command.words[0]} failed: {error.strerror}",
                hint=command.install(),
            ) from error
        try:
            names = [Requirement(each).name for each in command.requires]
            start = {"do": "start", "protocol": PROTOCOL, "settings": command.settings, "packages": names}  # fmt: skip
            self._check(self.ask(start, command.start_seconds))
        except BaseException:
            self.kill()
            raise

    @property
    def running(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a request, wait for the answer and return it.

        Args:
            request: the request, of JSON values; `do` names the operation.
            seconds: the time limit, after which the process is killed; None for no limit.

        Raises:
            EnvironmentProcessError: the process died, took too long, or its answer is not a JSON object.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.busy = True
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds or 0, end)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        line = ""
        try:
            # Ignore a broken pipe, since the end of the process is reported below.
            with suppress(BrokenPipeError, ValueError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline(_LONGEST)
        finally:
            timer.cancel()
        title, what = self._command.title, request["do"]
        if late.is_set():
            raise EnvironmentProcessError(
                f"{title} did not answer the request {what!r} within {seconds:g} s and was ended; its last output: {self._last_line()}",
                hint="raise the environment's start_seconds",
            )
        if not line:
            status = self._process.wait()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            raise EnvironmentProcessError(f"the process of {title} ended {how} during the request {what!r}; its last output: {self._last_line()}")  # fmt: skip
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise EnvironmentProcessError(f"{title} answered the request {what!r} with {line.strip()[:_SHOWN]!r}; expected a line with a JSON object")  # fmt: skip
        self.busy = False
        return answer

    def kill(self) -> None:
        """End the process and its children; safe to call twice, and from another thread."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _check(self, answer: Mapping[str, Any]) -> None:
        title, command = self._command.title, self._command
        if answer.get("protocol") != PROTOCOL:
            what = (
                f"protocol {answer['protocol']!r}" if "protocol" in answer else f"{answer!r:.200}"
            )
            raise EnvironmentProcessError(
                f"{title} answered with {what}; expected protocol {PROTOCOL} of the worker processes",
                hint=f"install a version of the environment that supports protocol {PROTOCOL}",
            )
        found = answer.get("packages") or {}
        lacking = []
        for each in map(Requirement, command.requires):
            version = found.get(each.name)
            if version is None or not each.specifier.contains(version, prereleases=True):
                lacking.append(
                    f"{each} ({f'installed: {version}' if version else 'not installed'})"
                )
        if lacking:
            python = f"{command.words[0]} (Python {answer.get('python')})"
            raise EnvironmentProcessError(f"{title} lacks packages in {python}: it needs {', '.join(lacking)}", hint=command.install())  # fmt: skip

    def _last_line(self) -> str:
        with suppress(OSError):
            text = self._command.log.read_bytes()[-4096:].decode("utf-8", "replace")
            lines = [line for line in text.splitlines() if line.strip()]
            # The further lines of a wrapped message are indented.
            first = max((n for n, line in enumerate(lines) if not line[0].isspace()), default=0)
            return " ".join(line.strip() for line in lines[first:])[:_SHOWN]
        return ""


class WorkerPool:
    """A pool of an environment's worker processes, started on demand; each process runs one episode after another.

    Args:
        command: the command that starts a process.
        most: the maximum number of processes.
    """

    def __init__(self, command: WorkerCommand, most: int) -> None:
        self._command, self._most = command, most
        self._places: asyncio.Semaphore | None = None
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="dovetail-environment")
        self._all: set[EnvironmentProcess] = set()
        self._idle: list[EnvironmentProcess] = []

    def ask_once(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start a process, send one request, end the process and return the answer; for errors see `EnvironmentProcess`."""
        worker = EnvironmentProcess(self._command)
        try:
            return worker.ask(request, self._command.start_seconds)
        finally:
            worker.kill()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[EnvironmentProcess]:
        """Return a context with exclusive use of a process, which is killed if a request is still unanswered at the end.

        Raises:
            EnvironmentProcessError: the process can't be started.
        """
        if self._places is None:
            self._places = asyncio.Semaphore(self._most)
        async with self._places:
            starting = asyncio.get_running_loop().run_in_executor(self._threads, self._ready)
            try:
                # The starting thread can't be cancelled, so its process is kept for a later episode.
                worker = await asyncio.shield(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(self._unused)
                raise
            try:
                yield worker
            finally:
                if worker.busy:
                    self._all.discard(worker)
                    worker.kill()
                else:
                    self._idle.append(worker)

    async def ask(self, worker: EnvironmentProcess, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to a process and return its answer; for errors see `EnvironmentProcess.ask`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, worker.ask, request)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        while self._all:
            self._all.pop().kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _unused(self, starting: asyncio.Future[EnvironmentProcess]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._idle.append(starting.result())

    def _ready(self) -> EnvironmentProcess:
        """Return an idle process, or start one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.running:
                return worker
            self._all.discard(worker)
        worker = EnvironmentProcess(self._command)
        self._all.add(worker)
        return worker
