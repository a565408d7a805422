"""ServerProcess: the process of a server that a replica starts, with its log; it ends in any case when the replica ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.errors import RolloutError
from dovetail_serving import guard

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a port of the loopback interface on which no process listens."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def refuse_used(port: int, engine: str) -> None:
    """Raise an error if a port is in use; the engine itself would find out only after a minute.

    Args:
        port: the port of the loopback interface.
        engine: the engine's name in messages.

    Raises:
        RolloutError: another process listens at the port.
    """
    with socket.socket() as probe:
        # With SO_REUSEADDR, connections of an earlier server in TIME_WAIT do not count as a port in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise RolloutError(
                f"{engine} can't be served at {LOOPBACK}:{port}: the port is in use ({error.strerror})",
                hint="set rollout.port to a free port, or leave it out: Dovetail then finds a free one",
            ) from error


class ServerProcess:
    """A process that runs a command. It is ended by `close`, or when the process that created it ends or is killed.

    Args:
        command: program and arguments.
        log: the file for the command's output; an existing file is renamed with a number, `.1`, `.2`, …
        environment: environment variables in addition to this process's.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(_kept(log))
        with log.open("ab") as output:
            self._guard = subprocess.Popen(  # noqa: S603 - this interpreter with our own program
                [sys.executable, "-I", guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,  # no Ctrl-C here; the trainer handles it
            )

    @property
    def exit_status(self) -> int | None:
        """The exit status as in a shell; None while the process runs."""
        return self._guard.poll()

    def close(self) -> None:
        """End the process and wait for it; safe to call twice."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        try:
            self._guard.wait(timeout=guard.GRACE + 10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()


def _kept(log: Path) -> Path:
    """Return an unused path to which an earlier log can be renamed: `log` with `.1`, `.2`, … appended.

    Earlier logs are kept, since the first of several failures is often the most informative.
    """
    return next(
        path
        for number in itertools.count(1)
        if not (path := log.with_name(f"{log.name}.{number}")).exists()
    )
