"""Decides mathematical equality by math-verify, in processes that can be killed at a time limit; usable from any thread."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import PluginNeedsError, RewardError
from dovetail_rewards.process_pool import (
    ProcessDiedError,
    ProcessPool,
    Reply,
    RequestTimeoutError,
)

MEMORY = 2 << 30
"""Maximum address space of one process, in bytes."""
_PROGRAM = Path(__file__).with_name("math_worker.py")


class MathTimeoutError(TimeoutError):
    """The comparison of the ground truth with the number 1 exceeded the time limit, so the answer is not the cause."""


class MathProcesses:
    """Processes that compare answers, started when needed and reused; thread-safe.

    math-verify's own time-outs use signals, which fail outside a main thread, and would count as "not equal". So math-verify runs without
    time-outs in a separate process, which is killed at the limit.

    An answer whose comparison ends without a result (time limit, memory, crash or an error of sympy) is wrong, so that a policy can't avoid
    a score by writing a power tower. The sample fails only if comparing the ground truth with the number 1 has no result either. A
    comparison takes up to the limit, or up to twice the limit if the ground truth is the cause.

    Args:
        count: the number of processes; callers beyond that number wait.
        program: the program of a process; for tests.
    """

    def __init__(self, count: int, program: Path = _PROGRAM) -> None:
        self._count = count
        self._command = [sys.executable, "-P", str(program), str(MEMORY)]
        self._reset()

    def equal(self, truths: Sequence[str], answer: str, *, limit: float) -> bool:
        """Return whether the answer equals an accepted answer.

        Args:
            truths: accepted answers, as LaTeX or plain text.
            answer: the response's answer.
            limit: wall-clock seconds that the comparison may take; waiting for a free process does not count.

        Raises:
            MathTimeoutError: comparing the ground truth with the number 1 takes longer than `limit`.
            RewardError: the process died, or the ground truth can be compared neither with the answer nor with the number 1.
        """
        reply = self._compare(truths, answer, limit)
        if "equal" not in reply:
            reply, alone = {"equal": False}, self._compare(truths, "1", limit)
            if alone.get("error") == "SIGALRM":
                raise MathTimeoutError(
                    f"math-verify could not parse the ground truth {truths!r:.80} within the limit of {limit:g} s"
                )
            if "equal" not in alone:
                raise RewardError(
                    f"math-verify can't compare the ground truth {truths!r:.80}: {alone.get('error')}"
                )
        return bool(reply["equal"])

    def _compare(self, truths: Sequence[str], answer: str, limit: float) -> Reply:
        """Return a process's reply: `equal`; or `error`, the signal that ended the comparison or the exception of sympy."""
        if self._owner != os.getpid():  # after a fork, the pool's processes are the parent's
            self._reset()
        request = {"truths": list(truths), "answer": answer, "limit": limit}
        # The process limits the comparison itself. The pool's longer limit kills a process that fails to, such as a stopped one.
        future = self._pool.submit(request, 2 * limit)
        try:
            return future.result()
        except RequestTimeoutError:
            return {"error": "SIGALRM"}
        except ProcessDiedError as error:
            raise RewardError(
                f"math-verify failed on an answer: its process {error.message}"
            ) from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the processes; safe to call twice."""
        if self._owner == os.getpid():
            self._pool.close()

    def _reset(self) -> None:
        self._pool = ProcessPool(self._command, self._count)
        self._owner = os.getpid()


def shared_processes(count: int) -> MathProcesses:
    """Return the processes that all reward functions with the same `count` share.

    Raises:
        PluginNeedsError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise PluginNeedsError(
            "a comparison of mathematical values (`verify`) needs the package math-verify, which is not installed",
            hint="pip install 'dovetail-rewards[math]', or set verify=text, which compares only the notation",
        )
    with _shared_lock:
        if count not in _shared:
            _shared[count] = MathProcesses(count)
            atexit.register(_shared[count].close)
        return _shared[count]


_shared: dict[int, MathProcesses] = {}
_shared_lock = threading.Lock()
