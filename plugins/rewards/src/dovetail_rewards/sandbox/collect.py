"""Reads a program's output while it runs, up to a limit, until the helper reports its end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

STDERR_TAIL = 1 << 14
"""The number of bytes kept from the end of standard error, which holds the traceback."""
_STARVED = 10  # the same factor as in helper/watch.py
_GRACE_S = 10.0
_CHUNK = 1 << 16


class OutputStreams:
    """The output streams and the status socket of one sandboxed program.

    Args:
        status: the socket on which the sandbox's helper process reports; closing this end asks the helper to end the program.
        stdout: reading end of standard output.
        stderr: reading end of standard error.
        limit: the byte limit of each stream.
        wall_s: the program's wall-clock limit in seconds; a helper that is silent much longer counts as dead.
    """

    def __init__(
        self, status: socket.socket, *, stdout: int, stderr: int, limit: int, wall_s: float
    ) -> None:
        self._status = status
        self._stdout, self._stderr = stdout, stderr
        self._limit = limit
        self._deadline = time.monotonic() + _STARVED * wall_s + _GRACE_S
        self._out = bytearray()
        self._err = bytearray()
        self._err_count = 0
        self._cut = False

    @property
    def stdout(self) -> bytes:
        """The first `limit` bytes of standard output."""
        return bytes(self._out[: self._limit])

    @property
    def stderr(self) -> bytes:
        """The last `STDERR_TAIL` bytes of standard error."""
        return bytes(self._err)

    def read(self) -> tuple[bytes, bool]:
        """Read until the helper's report; return the report (empty if none arrived) and whether the output exceeded the limit."""
        poll = select.poll()
        for fd in (self._status.fileno(), self._stdout, self._stderr):
            poll.register(fd, select.POLLIN)
        report = b""
        while not report:
            left = self._deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(left, 0) * 1000)}
            if not ready:
                self._stop()
                return b"", self._cut
            for fd in ready - {self._status.fileno()}:
                if not self._take(fd):
                    poll.unregister(fd)
            if self._status.fileno() in ready:
                report = self._status.recv(_CHUNK)
                break
        if report:  # without a report, the output is not used
            self._drain()
        return report, self._cut

    def _take(self, fd: int) -> bool:
        """Read the available bytes of a stream; return False at its end."""
        data = os.read(fd, _CHUNK)
        if fd == self._stdout:
            self._out += data[: self._limit + 1 - len(self._out)]
        else:
            self._err_count += len(data)
            self._err = (self._err + data)[-STDERR_TAIL:]
        if not self._cut and max(len(self._out), self._err_count) > self._limit:
            self._cut = True
            self._stop()
        return bool(data)

    def _drain(self) -> None:
        """Read the rest of both pipes without blocking, since all writing processes have ended."""
        for fd in (self._stdout, self._stderr):
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                while self._take(fd):
                    pass

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)
