"""A pool of processes for work that may hang or crash. Each process has one request at a time, and is killed at the request's limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any

from dovetail.errors import RewardError
from dovetail.telemetry import visible

MAX_REPLY_BYTES = 64 << 20
"""Maximum size of a reply, in bytes; a process that sends more is killed."""
MAX_PRINTED_BYTES = 1 << 20
"""Maximum bytes of a process's standard error that are shown."""
_TICK = 0.1
"""Seconds between a thread's checks of whether its process lives and its request was cancelled."""
_GRACE = 0.5
"""Seconds that a process may take to end by itself after its input has ended."""
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
Reply = dict[str, Any]
_Task = tuple[Mapping[str, Any], float | None, "Future[Reply]"]


class RequestTimeoutError(TimeoutError):
    """No reply arrived within the limit; the process was killed."""


class StartError(RewardError):
    """No process could be started, or the pool is closed; no process received the request."""


class ProcessDiedError(RewardError):
    """The process ended, or sent an invalid reply, while it worked on the request."""


class ProcessPool:
    """Processes that read numbered requests, lines of JSON, from standard input, and write replies with the same number to standard output.

    The first request is `setup`; an `error` in the reply says why the process can't be used. One thread per process sends one request at a
    time, so that the end of a process fails a single request. A process's standard error is shown, up to `MAX_PRINTED_BYTES` bytes. A
    process's children die with the process.

    multiprocessing and pools based on it (pebble) are not used: their children rerun the user's main script, their replies are unpickled,
    and one process can garble the pipe to which all processes write.

    Args:
        command: the command that starts a process.
        count: the maximum number of processes, which are started when needed.
        setup: the first request.
        start_timeout: seconds that a process may take to answer the first request.
        log: a function that is called with a message when a process has ended unexpectedly.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        setup: Mapping[str, Any] | None = None,
        start_timeout: float = 120.0,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._command, self._count = list(command), count
        self._setup, self._start_timeout = dict(setup or {}), start_timeout
        self._log = log
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._free = 0  # number of idle threads minus number of queued requests
        self._processes: set[_Process] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the live processes."""
        return [process.popen.pid for process in list(self._processes)]

    def start(self) -> None:
        """Start all processes and wait until each has answered `setup`.

        Raises:
            StartError: a process could not start.
        """
        with self._lock:
            started = [self._add_thread() for _ in range(self._count)]
        for one in started:
            one.result()

    def submit(self, request: Mapping[str, Any], limit: float | None) -> Future[Reply]:
        """Queue a request. Cancelling the future kills the process that works on it.

        Args:
            request: the request, of JSON values.
            limit: the time limit in seconds, from when a process starts on the request; None for no limit.

        Returns:
            The reply; or RequestTimeoutError, ProcessDiedError or StartError as the future's exception.
        """
        answer: Future[Reply] = Future()
        with self._lock:
            if self._closed:
                answer.set_exception(
                    StartError("a process can't be started: the pool of processes was closed")
                )
                return answer
            self._free -= 1
            if self._free < 0 and len(self._threads) < self._count:
                self._add_thread()
            self._tasks.put((request, limit, answer))
        return answer

    def close(self) -> None:
        """Kill busy processes, end idle ones, and answer queued requests with StartError; safe to call twice."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            self._threads.clear()
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join()

    def _add_thread(self) -> Future[None]:
        started: Future[None] = Future()
        thread = threading.Thread(
            target=self._serve, args=(started,), name="dovetail-process-pool", daemon=True
        )
        self._free += 1
        self._threads.append(thread)
        thread.start()
        return started

    def _serve(self, started: Future[None]) -> None:
        """Run one thread of the pool: start a process, pass requests to it, and replace it if it is lost.

        Args:
            started: the future that completes when the first process has answered `setup`, or gets the error of its start.
        """
        process: _Process | None = None
        try:
            process = self._begin()
            started.set_result(None)
        except Exception as error:  # noqa: BLE001 - start raises it
            started.set_exception(error)
        while (task := self._tasks.get()) is not None:
            request, limit, answer = task
            if not answer.cancelled():
                process, reply = self._work(process, request, limit, answer.cancelled)
                with contextlib.suppress(InvalidStateError):  # the request was cancelled
                    if isinstance(reply, Exception):
                        answer.set_exception(reply)
                    else:
                        answer.set_result(reply)
            with self._lock:
                self._free += 1
        if process is not None:
            self._end(process, _GRACE)

    def _begin(self) -> _Process:
        if self._closed:
            raise StartError("a process can't be started: the pool of processes was closed")
        try:
            process = _Process(self._command)
        except OSError as error:
            raise StartError(f"a process can't be started: {error}") from error
        self._processes.add(process)
        try:
            reply = process.exchange(self._setup, self._start_timeout, lambda: self._closed)
            problem = reply.get("error")
        except RequestTimeoutError:
            problem = f"the process was not ready within {self._start_timeout:g} s"
        except (ProcessDiedError, InterruptedError) as error:
            problem = str(error)
        if problem is None:
            return process
        how = self._end(process, _GRACE)
        raise StartError(f"a process could not be started: {problem} (it {how})")

    def _work(
        self,
        process: _Process | None,
        request: Mapping[str, Any],
        limit: float | None,
        cancelled: Callable[[], bool],
    ) -> tuple[_Process | None, Reply | Exception]:
        """Send a request to a process, which is started if `process` is None or has ended.

        Returns:
            The process, or None if it ended or was killed; and its reply, or the error because of which there is none.
        """
        try:
            if process is not None and process.popen.poll() is not None:
                self._log(f"an idle process {self._end(process, 0.0)}")
                process = None
            process = process or self._begin()
            reply = process.exchange(request, limit, lambda: self._closed or cancelled())
        except StartError as error:
            self._log(error.message)
            return None, error
        except ProcessDiedError as error:
            assert process is not None
            how = self._end(process, _GRACE)
            self._log(f"a process {how}: {error.message}")
            return None, ProcessDiedError(how)
        except (RequestTimeoutError, InterruptedError) as error:
            assert process is not None
            self._end(process, 0.0)
            return None, error
        return process, reply

    def _end(self, process: _Process, patience: float) -> str:
        self._processes.discard(process)
        return process.end(patience)


class _Process:
    """A process, the socket at its standard input and output, and the pipe of its standard error. Used by one thread only."""

    def __init__(self, command: Sequence[str]) -> None:
        self._channel, theirs = socket.socketpair()
        self._printed, printing = os.pipe()
        try:
            self.popen: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - the pool's own command
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=printing,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # no Ctrl-C here, and killpg reaches children
            )
        except BaseException:
            self._channel.close()
            os.close(self._printed)
            raise
        finally:
            theirs.close()
            os.close(printing)
        self._channel.setblocking(False)
        os.set_blocking(self._printed, False)
        self._poll = select.poll()
        self._poll.register(self._printed, select.POLLIN)
        self._left = MAX_PRINTED_BYTES
        self._number = 0
        self._sending = b""
        self._wanted = 0

    def exchange(
        self, request: Mapping[str, Any], limit: float | None, ended: Callable[[], bool]
    ) -> Reply:
        """Send a request and wait for the reply.

        Raises:
            RequestTimeoutError: no reply arrived within the limit.
            ProcessDiedError: the process ended, or sent an invalid reply.
            InterruptedError: `ended()` is true, since the request was cancelled or the pool closed.
        """
        self._number += 1
        self._sending = json.dumps({"number": self._number, **request}).encode() + b"\n"
        end = time.monotonic() + (math.inf if limit is None else limit)
        with contextlib.suppress(OSError):  # receiving detects the process's end
            self._send()
        received = bytearray()
        while True:
            left = end - time.monotonic()
            received += self._move(max(0.0, min(left, _TICK)))
            if received.endswith(b"\n"):
                return self._reply(bytes(received))
            if len(received) > MAX_REPLY_BYTES:
                raise ProcessDiedError(
                    f"the process sent a reply of more than {MAX_REPLY_BYTES} bytes, the limit of a reward function's result"
                )
            if left <= 0:
                raise RequestTimeoutError(f"the process sent no reply within {limit:g} s")
            if ended():
                raise InterruptedError("the request was cancelled, or the pool closed")

    def _move(self, seconds: float) -> bytes:
        """Send request bytes, show printed text and receive reply bytes, waiting up to `seconds` until one is possible."""
        wanted = select.POLLIN | (select.POLLOUT if self._sending else 0)
        if wanted != self._wanted:
            self._poll.register(self._channel, wanted)
            self._wanted = wanted
        ready = dict(self._poll.poll(1000 * seconds))
        if self._printed in ready:
            self._show()
        events = ready.get(self._channel.fileno(), 0)
        received = b""
        try:
            if events & select.POLLOUT:
                self._send()
            if events & ~select.POLLOUT:
                received = self._channel.recv(1 << 20)
        except OSError as error:
            raise ProcessDiedError(str(error)) from error
        # A child of an ended process may keep the channel open, which then shows no end.
        silent = not events and self.popen.poll() is not None
        if silent or (events & ~select.POLLOUT and not received):
            raise ProcessDiedError("the process ended, or closed its channel")
        return received

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._sending = self._sending[self._channel.send(self._sending) :]

    def _reply(self, line: bytes) -> Reply:
        try:
            reply = json.loads(line)
            if reply.pop("number") == self._number:
                return dict(reply)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise ProcessDiedError(f"the process sent an invalid reply: {line[:80]!r}")

    def _show(self) -> None:
        """Show the process's printed text up to the limit; the rest is read and dropped, so that the process does not block."""
        try:
            data = os.read(self._printed, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._printed)
        elif self._left > 0:
            text = visible(data[: self._left].decode("utf-8", "replace"))
            self._left -= len(data)
            if self._left <= 0:
                text += f"\n(process {self.popen.pid} has printed {MAX_PRINTED_BYTES} bytes; the rest is not shown)\n"
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)

    def end(self, patience: float) -> str:
        """End the process and its children, and return how the process ended.

        Args:
            patience: seconds that the process may take to end by itself.
        """
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        code = self.popen.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._show()  # such as the error message of a crashed interpreter
        os.close(self._printed)
        if code is None:
            return "was killed"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
