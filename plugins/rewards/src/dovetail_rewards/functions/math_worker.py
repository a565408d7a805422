"""The program of a process that compares mathematical answers with math-verify, for a ProcessPool.

It is started by path and imports nothing of Dovetail. A forked child compares; if the child is killed at its limit or crashes, the next
one is forked within milliseconds, with math-verify loaded. Both end when the standard input closes, so that no process outlives the run
even where sympy hangs.
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
    """What math-verify reads in a text, as if boxed; empty where it reads nothing that it can compare: `3:00` is not division by zero."""
    from math_verify import parse
    from sympy import nan, zoo

    # Without its own time-outs, which are signals and end as a wrong answer: a limit here ends as an error.
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
    os.dup2(silent, 1)  # no library's print may look like a reply
    os.dup2(silent, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a child even inside one long operation
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compare(["1"], "x")  # imports, and builds the grammar's tables
    number = mmap.mmap(-1, 8)  # of the request that the child works on
    while (child := os.fork()) != 0:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0:  # the input ended
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
    """The reply to a request; its limit ends the process."""
    signal.setitimer(signal.ITIMER_REAL, request["limit"])
    try:
        return {"equal": compare(request["truths"], request["answer"])}
    except Exception as error:  # noqa: BLE001 - the reward raises it
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
