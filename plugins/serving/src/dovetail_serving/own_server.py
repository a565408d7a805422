"""OwnServer: a server that a replica starts for itself; this module starts the process and waits until it is healthy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from dovetail.errors import DovetailError, RolloutError
from dovetail.interfaces import PluginConfig
from dovetail.workers import await_turn
from dovetail_serving.connection import ServerConnection
from dovetail_serving.failures import Failures
from dovetail_serving.process import LOOPBACK, ServerProcess, free_port, refuse_used

_LOOK_SECONDS = 0.2


class PortTakenError(RolloutError):
    """Another process took the port of a server before the server did."""


def port_for(first: int | None, rank: int, engine: str) -> int:
    """Return the port for a replica's server: `first` plus the rank, or a free port.

    Args:
        first: the port of replica 0, or None for a free port.
        rank: the replica's number.
        engine: the engine's name in messages.

    Raises:
        RolloutError: the port is in use.
    """
    if first is None:
        return free_port()
    refuse_used(first + rank, engine)
    return first + rank


class OwnServer:
    """A server of one replica on the loopback interface, started by the constructor.

    Args:
        command: program and arguments; the server must listen on `port`.
        port: the port of the loopback interface.
        log: the log file.
        environment: environment variables in addition to this process's.
        failures: the engine's known failures, recognised in the log.
        config: the rollout's config; `start_timeout` limits the start.
        turn: the lock file that is held while the run's training models load (`dovetail.workers.loading`); `ready` first waits for its
            release, and `start_timeout` counts from then on. None for no wait.

    Attributes:
        url: the server's address.
        log: the log file.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        environment: Mapping[str, str],
        failures: Failures,
        config: PluginConfig,
        turn: Path | None = None,
    ) -> None:
        self.url, self.log = f"http://{LOOPBACK}:{port}", log
        self._failures, self._config, self._turn = failures, config, turn
        self._process = ServerProcess(command, log=log, environment=environment)

    async def ready(
        self, connection: ServerConnection, prove: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Wait until the server answers.

        Args:
            connection: the connection to the server.
            prove: a function that tests a healthy server with a request, and raises an error of `httpx2` if the server is not ready. None
                requests Dovetail's description path.

        Raises:
            PortTakenError: another process listens at the port.
            RolloutError: the server ended, or took longer than `start_timeout`.
            DovetailError: the start failed for a known cause.
        """
        import httpx2

        if self._turn is not None:
            await asyncio.to_thread(await_turn, self._turn)
        limit: float = self._config.start_timeout
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if (how := self.ended()) is not None:
                raise self._failure(RuntimeError(f"the server {how}"))
            try:
                if await connection.health() == httpx2.codes.OK:
                    await (connection.ask("describe") if prove is None else prove())
                    return
            except httpx2.HTTPError:
                pass  # the server does not listen yet
            await asyncio.sleep(_LOOK_SECONDS)
        raise self._failure(
            TimeoutError(
                f"the server at {self.url} was not healthy within rollout.start_timeout={limit:g} s"
            )
        )

    def ended(self) -> str | None:
        """Return how the server's process ended; None while it runs."""
        status = self._process.exit_status
        return None if status is None else f"ended with status {status}"

    def death(self, how: str) -> RolloutError:
        """Return the error for a server that died after its start."""
        return self._failures.death(how, self.log)

    def close(self) -> None:
        """End the server; safe to call twice."""
        self._process.close()

    def _failure(self, error: Exception) -> DovetailError:
        printed = self._failures.tail_of(self.log)
        if "address already in use" in printed.lower():
            return PortTakenError(
                f"{self._failures.engine} can't be served at {self.url}: another process took the port before the "
                "server did",
                hint="start the run again, or set rollout.port to a port that stays free",
            )
        return self._failures.start(error, self.log, self._config)
