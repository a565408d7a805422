"""Mathematical equality by math-verify, in processes that can be killed: safe in threads, and a hang is an error and no 0."""

from __future__ import annotations

import atexit
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import PluginNeedsError, RewardError
from dovetail_rewards.process_pool import ProcessDiedError, ProcessPool, RequestTimeoutError

MEMORY = 2 << 30
"""Bytes of address space of one process."""
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
        self._command = [sys.executable, "-P", str(program), str(MEMORY)]
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
        future = self._pool.submit(request, 10 * limit)
        try:
            reply = future.result()
        except RequestTimeoutError:
            raise MathTimeoutError(f"math-verify had no answer within {10 * limit:g} s") from None
        except ProcessDiedError as error:
            if error.code == -signal.SIGPROF:
                return None
            raise RewardError(f"the process of math-verify {error.message}") from None
        except BaseException:
            future.cancel()
            raise
        if "equal" not in reply:
            raise RewardError(f"math-verify can't compare {answer!r:.80}: {reply.get('error')}")
        return bool(reply["equal"])

    def close(self) -> None:
        """End the processes; safe to call twice."""
        if self._owner == os.getpid():
            self._pool.close()

    def _reset(self) -> None:
        self._pool = ProcessPool(self._command, self._count)
        self._owner = os.getpid()


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
