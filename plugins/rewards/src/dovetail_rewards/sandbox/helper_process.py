"""HelperProcess: starts the sandbox's helper process, and sends requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from dovetail_rewards.sandbox.errors import SandboxError, SandboxUnreachableError
from dovetail_rewards.sandbox.helper.wire import Request, SandboxSetup

CLEAN_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All environment variables of programs, besides HOME and TMPDIR."""

_START = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
    "from helper.server import main; main()"
)
_START_S = 30.0
_STOP_S = 5.0


class HelperProcess:
    """A helper process that runs programs in a sandbox. Threads and forks of the calling process may share it.

    Args:
        python: the interpreter of the helper and of the programs.
        setup: the confinement that the helper applies to programs.
        user: the user id of the helper (for tests as an unprivileged user); None keeps this process's user id.

    Raises:
        SandboxError: the isolation level is not available on this machine.
    """

    def __init__(self, python: str, setup: SandboxSetup, *, user: int | None = None) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -I would ignore PYTHONHASHSEED. It is not needed, since the environment has only our variables.
            command = [python, "-S", "-B", "-X", "utf8", "-c", _START]
            try:
                self._process = subprocess.Popen(  # noqa: S603 - our own helper
                    [*command, json.dumps(setup), str(theirs.fileno())],
                    env=CLEAN_ENVIRONMENT,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                )
            except OSError as error:
                ours.close()
                raise SandboxError(
                    f"the sandbox's interpreter {python} can't be run: {error}"
                ) from error
        self._socket = ours
        try:
            self._socket.settimeout(_START_S)
            answer = self._socket.recv(1 << 12).decode("utf-8", "replace")
            self._socket.settimeout(None)
        except OSError:
            answer = f"the sandbox's helper did not start within {_START_S:.0f} s"
        if answer != "ready":
            self.close()
            raise SandboxError(
                answer or f"the sandbox's helper, run by {python}, ended without an error message"
            )

    @property
    def pid(self) -> int:
        """The helper's process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the helper process still runs."""
        return self._process.poll() is None

    def send(self, request: Request, descriptors: Sequence[int]) -> None:
        """Ask the helper to run a program.

        Args:
            request: the program's limits.
            descriptors: the status socket, stdin, stdout, stderr and the payload; the caller closes them afterwards.

        Raises:
            SandboxUnreachableError: the helper is gone.
        """
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
        except OSError as error:
            raise SandboxUnreachableError(
                f"the sandbox's helper process has ended: {error}"
            ) from error

    def close(self) -> None:
        """End the helper; a running program ends when its caller closes the status socket."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
            return
        self._process.kill()
        self._process.wait()


def default_python() -> str:
    """Return the path of the base interpreter, from which this process's virtual environment, if any, was made."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
