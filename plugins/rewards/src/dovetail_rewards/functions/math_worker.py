"""The program of a process that compares mathematical answers with math-verify, for a ProcessPool.

It is started by path and imports nothing of Dovetail. It ends with its standard input, and by SIGPROF where a request uses up its
CPU time or its memory, so that none outlives the run even where sympy hangs.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any


def compare(truths: Sequence[str], answer: str) -> dict[str, Any]:
    """Whether an answer equals one of the accepted ones.

    Returns:
        `equal`; or `equal` False with `unread`: which side is no expression that math-verify reads.

    Raises:
        Exception: whatever sympy raises while it compares.
    """
    from math_verify import verify

    found = _parsed(answer)
    read = [gold for gold in map(_parsed, truths) if gold]
    if not found or not read:
        return {"equal": False, "unread": "ground truth" if found else "answer"}
    equal = any(verify(gold, found, timeout_seconds=None, raise_on_error=True) for gold in read)
    return {"equal": equal}


def _parsed(text: str) -> list[Any]:
    """What math-verify reads in a text, as if boxed; empty where it reads nothing."""
    from math_verify import parse

    # Without its own time-outs, which are signals and end as a wrong answer: the parent's limit ends as an error.
    try:
        return list(parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parser raises anything on what it can't read
        return []


def serve(memory: int) -> None:
    """Answer the requests of a ProcessPool until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)  # no library's print may look like a reply
    os.dup2(silent, 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process even inside one long operation
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        if "truths" in request:
            reply = _limited(request)
        else:  # the first request
            compare(["1"], "x")  # imports, and builds the grammar's tables
        replies.write(json.dumps({"number": request["number"], **reply}) + "\n")
        replies.flush()


def _limited(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request; ends the process where it uses up its CPU time or its memory."""
    signal.setitimer(signal.ITIMER_PROF, request["limit"])
    try:
        return compare(request["truths"], request["answer"])
    except MemoryError:
        signal.raise_signal(signal.SIGPROF)
        raise
    except Exception as error:  # noqa: BLE001 - the reward raises it
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
