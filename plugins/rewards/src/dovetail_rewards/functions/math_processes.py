"""Mathematical equality by math-verify, in processes that can be killed: safe in threads, and a hang is an error and no 0."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import PluginNeedsError, RewardError

MEMORY = 2 << 30
"""Bytes of address space of one process."""
_START_LIMIT = 120.0
"""Seconds that a process may take to import sympy, on a machine that is busy."""
_PROGRAM = Path(__file__).with_name("math_worker.py")


class MathTimeoutError(TimeoutError):
    """A comparison was still running at its limit, or needed more memory than there is for it."""


class MathProcesses:
    """Processes that compare answers, begun when needed and kept; any thread may ask.

    math-verify guards itself with signals. These fail outside a main thread, and whoever takes that error, or its own time-out, for "not
    equal" scores right answers as 0. So it runs without them in a process of its own, and what exceeds the limit is killed.

    A comparison that uses up its CPU time or its memory is a failure, unless the answer alone is the cause: comparing the number 1 with
    the answer uses them up as well, and comparing the truths with the number 1 does not. Such an answer, like a power tower or a
    polynomial of degree 100,000, is wrong. Time on the clock never makes an answer wrong, since a busy machine uses it up too.

    Args:
        count: processes at once; further callers wait.
        program: what a process runs; for tests.
    """

    def __init__(self, count: int, program: Path = _PROGRAM) -> None:
        self._count = count
        self._program = program
        self._reset()

    def equal(self, truths: Sequence[str], answer: str, *, limit: float) -> bool:
        """Whether the answer equals one of the truths. Waiting for a free process does not count towards the limit.

        Args:
            truths: accepted answers, as LaTeX or plain text.
            answer: the response's.
            limit: seconds of CPU time that the comparison may take; on the clock it has ten times that.

        Raises:
            MathTimeoutError: it took longer, or more memory, and not because of the answer alone; its process was killed.
            RewardError: the process died, or sympy raised an exception.
        """
        equal = self._compare(truths, answer, limit)
        if equal is None:
            truths_pass = self._compare(truths, "1", limit) is not None
            if truths_pass and self._compare(["1"], answer, limit) is None:
                return False
            raise MathTimeoutError(
                f"math-verify needs more than {limit:g} s of CPU time or {MEMORY >> 20} MiB of memory"
                f" to compare {answer!r:.80} with the ground truth"
            )
        return equal

    def _compare(self, truths: Sequence[str], answer: str, limit: float) -> bool | None:
        """As `equal`; None where CPU time or memory were used up."""
        if self._owner != os.getpid():  # after a fork the processes belong to the parent
            self._reset()
        request = {"truths": list(truths), "answer": answer, "limit": limit}
        with self._places:
            process = self._take()
            try:
                reply = process.ask(request, 10 * limit)
            except BaseException:
                process.kill()
                raise
            if "equal" not in reply:
                process.kill()
                if "error" in reply:
                    raise RewardError(f"math-verify can't compare {answer!r:.80}: {reply['error']}")
                return None
            with self._lock:
                self._idle.append(process)
        return bool(reply["equal"])

    def close(self) -> None:
        """End the idle processes; safe to call twice."""
        if self._owner != os.getpid():
            return
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for process in idle:
            process.kill()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(self._count)
        self._idle: list[_Process] = []

    def _take(self) -> _Process:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return _Process(self._program)
            if process.alive:
                return process
            process.kill()


class _Process:
    """One process, ready for requests."""

    def __init__(self, program: Path) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", str(program), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._buffer = b""
        try:
            self._answer(_START_LIMIT)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The reply to one request, empty where the process used up its CPU time or memory; the limit is on the clock."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None
        return self._answer(limit)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _answer(self, limit: float) -> dict[str, Any]:
        assert self._popen.stdout is not None
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise MathTimeoutError(f"math-verify had no answer within {limit:g} s")
                data = os.read(self._popen.stdout.fileno(), 65536)
                if not data:
                    error = self._died()
                    if self._popen.returncode == -signal.SIGPROF:
                        return {}
                    raise error
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _died(self) -> RewardError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        return RewardError(f"the process of math-verify ended with code {self._popen.returncode}")


def shared_processes(count: int) -> MathProcesses:
    """The processes that all functions of this Python process share, by their number.

    Raises:
        PluginNeedsError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise PluginNeedsError(
            "mathematical equality needs the package math-verify, which is not installed",
            hint="pip install 'dovetail-rewards[math]', or set verify=text to compare notations alone",
        )
    with _shared_lock:
        if count not in _shared:
            _shared[count] = MathProcesses(count)
            atexit.register(_shared[count].close)
        return _shared[count]


_shared: dict[int, MathProcesses] = {}
_shared_lock = threading.Lock()
