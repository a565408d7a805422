"""OwnServer: a judge's vLLM server, started on the loopback interface, started again when it dies, ended with the run."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError, RewardError
from dovetail.interfaces import PluginContext
from dovetail.serving import LOOPBACK, Failures, ServerProcess, free_port
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.judge_server_config import JudgeServerConfig
from dovetail_rewards.managers.threads import DaemonThreads, HungCalls
from dovetail_rewards.models.judge_server import JudgeServer, Mended

# `vllm serve` looks up a distribution of the name vllm, which its CPU builds do not have.
_MODULE = "vllm.entrypoints.openai.api_server"
_KEY_VARIABLE = "VLLM_API_KEY"
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LOOK_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
"""How long a healthy server may take to say which models it has."""
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": LOOPBACK}
"""Figures about a run are nobody else's, and its processes meet on this machine."""
_DYING_SECONDS = 1.0
"""How long a server that has stopped answering may take to end: its processes do not go at once."""
_MENDERS = 1 << 20
"""Requests that may wait for a server to come back: any number."""
_LOG = Failures("the judge's server", re.compile(r"^\(\w+ pid=\d+\) "))


class OwnServer(JudgeServer):
    """A vLLM server that serves the judge under the name of its model, to whoever has a random key.

    It ends with this process, however that ends. What it prints goes to `logs/judge.log` of the run directory.

    Args:
        config: the judge; its `server` is set.
        context: of its manager; the role is what the log is called, where a run has several judges.
    """

    def __init__(self, config: JudgeConfig, context: PluginContext) -> None:
        assert config.server is not None
        self._server: JudgeServerConfig = config.server
        self._model = config.model
        self._logger = context.logger
        self.key = secrets.token_urlsafe(32)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if context.run_directory is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="dovetail-judge-")
            folder = Path(self._scratch.name)
        else:
            folder = Path(context.run_directory) / "logs"
        self._log = folder / (f"judge-{context.role}.log" if context.role else "judge.log")
        self._port = self._server.port
        self._process: ServerProcess | None = None
        self._left = self._server.restarts
        self._gone: str | None = None
        self._mending = threading.Lock()
        self._closed = False
        self._threads = DaemonThreads(HungCalls(_MENDERS))

    @property
    def url(self) -> str:
        """The endpoint's base; set by `start`."""
        return f"http://{LOOPBACK}:{self._port}/v1"

    def start(self) -> str:
        """Start it, and wait until it is healthy.

        Raises:
            RewardError: it ended, or was not healthy within `start_timeout`; with the end of what it printed.
        """
        self._port = self._port or free_port()
        self._launch()
        return self.url

    async def mend(self) -> Mended:
        """Start it again, where it has died and may be; a server that runs is left alone."""
        process = self._process
        deadline = time.monotonic() + _DYING_SECONDS
        while process is not None and process.exit_status is None:
            if time.monotonic() > deadline:
                return Mended(there=True)
            await asyncio.sleep(_LOOK_SECONDS)
        mended: Mended = await self._threads.run(self._mend)
        return mended

    def close(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._threads.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _mend(self) -> Mended:
        with self._mending:
            if self._gone is not None:
                return Mended(there=False, words=self._gone)
            process = self._process
            if (
                process is None or process.exit_status is None
            ):  # closed; or another request saw to it
                return Mended(there=process is not None)
            words = f"the judge's server {_how(process.exit_status)}"
            while self._left > 0 and not self._closed:
                self._left -= 1
                self._logger.warning(
                    f"{words}{self._printed()}\nit is started again ({self._left} more times after this)"
                )
                try:
                    self._launch()
                except DovetailError as error:
                    words = error.message
                else:
                    return Mended(there=True, words=words)
            self._gone = f"{words}, and is not started again (reward.manager.server.restarts = {self._server.restarts})"
            self._logger.error(f"{self._gone}{self._printed()}")
            return Mended(there=False, words=self._gone)

    def _launch(self) -> None:
        server = self._server
        environment = {**_QUIET, _KEY_VARIABLE: self.key or "", **server.environment}
        if server.devices:
            environment[_DEVICES_VARIABLE] = ",".join(map(str, server.devices))
        process = ServerProcess(self._command(), log=self._log, environment=environment)
        self._process = process
        self._logger.info(f"the judge's server {self.url} starts; it prints to {self._log}")
        try:
            self._until_healthy(process)
        except BaseException:
            process.close()
            raise

    def _until_healthy(self, process: ServerProcess) -> None:
        import httpx2

        limit = self._server.start_timeout
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0 and not self._closed:
            if process.exit_status is not None:
                raise self._failed(f"did not start: it {_how(process.exit_status)}")
            try:
                healthy = httpx2.get(
                    f"http://{LOOPBACK}:{self._port}/health", timeout=min(left, _ANSWER_SECONDS)
                )
                if healthy.status_code == httpx2.codes.OK:
                    self._check_ours()
                    return
            except httpx2.HTTPError:
                pass  # it does not listen yet
            time.sleep(_LOOK_SECONDS)
        raise self._failed(
            f"was not healthy within {limit:g} s (reward.manager.server.start_timeout)"
        )

    def _check_ours(self) -> None:
        """Ask for its models with the key, which nobody else knows: another server may have been faster on the port."""
        import httpx2

        headers = {"Authorization": f"Bearer {self.key}"}
        answer = httpx2.get(f"{self.url}/models", headers=headers, timeout=_ANSWER_SECONDS)
        if answer.status_code != httpx2.codes.OK or self._model not in answer.text:
            raise self._failed(
                f"is not the one that answers at {self.url}: /models gave status {answer.status_code}",
                hint="set reward.manager.server.port to one that is kept free, or leave it out",
            )

    def _command(self) -> list[str]:
        server = self._server
        arguments: dict[str, Any] = {"tensor_parallel_size": max(len(server.devices), 1)}
        arguments |= server.arguments
        arguments |= {
            "model": self._model,
            "served_model_name": self._model,
            "host": LOOPBACK,
            "port": self._port,
        }
        return [server.python or sys.executable, "-m", _MODULE, *_flags(arguments)]

    def _failed(self, what: str, hint: str | None = None) -> RewardError:
        printed = self._printed()
        if hint is None and re.search(r"No module named '?vllm", printed):
            hint = "set reward.manager.server.python to the interpreter of an environment that has vLLM"
        return RewardError(f"the judge's server {what}{printed}", hint=hint)

    def _printed(self) -> str:
        tail = _LOG.tail_of(self._log)
        return f"\nThe end of {self._log}:\n{tail}" if tail else ""


def _how(status: int) -> str:
    """An exit status in words, as shells number them."""
    if status > 128:
        try:
            return f"was ended by {signal.Signals(status - 128).name}"
        except ValueError:
            pass
    return f"ended with status {status}"


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as vLLM's command line takes them; None leaves one out."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            flags.append(f"--{flag}={json.dumps(value)}")
        elif isinstance(value, (list, tuple)):
            flags += [f"--{flag}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{flag}={value}")  # one word, so that a value may begin with a dash
    return flags
