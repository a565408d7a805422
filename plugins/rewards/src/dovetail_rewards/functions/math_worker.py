"""The program of a process that compares mathematical answers with math-verify, for a ProcessPool.

The process is started by path and imports nothing of Dovetail. A forked child does the comparisons. If the child is killed at the time
limit or crashes, another child is forked within milliseconds, with math-verify loaded. Both processes end when standard input closes, so
that none outlives the run, even if sympy hangs.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, TextIO


def compare(truths: Sequence[str], answer: str) -> bool:
    """Return whether an answer equals an accepted answer; False if math-verify can't parse it.

    Raises:
        Exception: sympy raised an exception during the comparison.
    """
    from math_verify import verify

    found = _parsed(answer)
    return any(
        verify(gold, found, timeout_seconds=None, raise_on_error=True)
        for gold in map(_parsed, truths)
    )


def _parsed(text: str) -> list[Any]:
    """Return the expressions that math-verify reads in a text, as if the text were in a box.

    Infinite and undefined values are left out, such as the value of `3:00`, which sympy reads as a division by zero. A text that
    math-verify can't parse has no expressions.
    """
    from math_verify import parse
    from sympy import nan, zoo

    # math-verify's own time-outs would turn into a wrong answer; the limit of `_limited` ends the process, which is an error.
    try:
        found = parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)
        return [one for one in found if one not in (nan, zoo)]
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parser raises anything on what it can't read
        return []


def serve(memory: int) -> None:
    """Answer the requests of a ProcessPool until standard input ends, within `memory` bytes of address space."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # keep the prints of libraries out of the replies
    os.dup2(silent, 2)
    # Unlike a Python handler, the default action ends the child even inside one long C call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compare(["1"], "x")  # import math-verify and build its grammar before forking
    number = mmap.mmap(-1, 8)  # shared: number of the request that the child works on
    while (child := os.fork()) != 0:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0:  # the child exited because the input ended
            sys.exit(code)
        _reply(replies, int.from_bytes(number[:], "big"), {"error": signal.Signals(-code).name})
    for line in sys.stdin:
        request = json.loads(line)
        number[:] = request["number"].to_bytes(8, "big")
        _reply(replies, request["number"], _limited(request) if "truths" in request else {})


def _reply(replies: TextIO, number: int, reply: dict[str, Any]) -> None:
    replies.write(json.dumps({"number": number, **reply}) + "\n")
    replies.flush()


def _limited(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request; at the request's time limit, SIGALRM ends this process."""
    signal.setitimer(signal.ITIMER_REAL, request["limit"])
    try:
        return {"equal": compare(request["truths"], request["answer"])}
    except Exception as error:  # noqa: BLE001 - the reward raises it
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
