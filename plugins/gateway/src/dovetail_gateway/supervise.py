"""Runs a user's program for the gateway, limits the program's output and processes, and kills all of its processes at the end.

Run as `python -I -S supervise.py SETTINGS` with a pipe as standard input. When the pipe closes, for example because the run has died,
all processes of the program are killed. Only the standard library is imported, so that the supervisor starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.25
"""Seconds between two counts of processes."""
_CHUNK = 1 << 16


def main(command: list[str], log: str, max_bytes: int, max_processes: int) -> dict[str, Any]:
    """Run a command until it ends, exceeds a limit, or standard input closes; then kill all of its processes.

    Args:
        command: the command's words.
        log: the file for the command's output.
        max_bytes: the limit of the output.
        max_processes: the limit of concurrent processes.

    Returns:
        `status`: the command's exit status, negative for a signal; None if the command was killed by this function or could not start.
        `reason`: why there is no status: `closed` (standard input was closed), `output` or `processes` (a limit was exceeded), or the
        error of the system; None if there is a status.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopts the program's orphans, so that none is lost
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(  # noqa: S603 - the config's command
            command,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - one thread
        )
    except OSError as error:
        return {"status": None, "reason": f"{command[0]}: {error.strerror}"}
    # The write end stays open here, so that a program that closes its own output does not end the reading.
    output = Output(reading, log, max_bytes)
    statuses: dict[int, int] = {}
    reason = watch(child.pid, output, statuses, max_processes)
    _end_all(statuses)
    while output.copy():
        pass
    reason = reason or ("output" if output.left < 0 else None)
    return {"status": statuses.get(child.pid) if reason is None else None, "reason": reason}


class Output:
    """The output of a program, copied into a file up to a limit.

    Args:
        pipe: the descriptor from which the output is read.
        log: the file for the output.
        most: the limit in bytes.

    Attributes:
        left: number of bytes that the program may still print; negative if it printed more.
    """

    def __init__(self, pipe: int, log: str, most: int) -> None:
        self.pipe, self.left = pipe, most
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.set_blocking(pipe, False)

    def copy(self) -> bool:
        """Copy a piece of the available output; return whether to call again: the pipe had data, and the limit is not exceeded."""
        try:
            data = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return False
        os.write(self._log, data[: max(self.left, 0)])
        self.left -= len(data)
        return bool(data) and self.left >= 0


def watch(child: int, output: Output, statuses: dict[int, int], max_processes: int) -> str | None:
    """Wait until a child process has ended, exceeds a limit, or standard input is closed.

    Return None if the child has ended, else the reason to kill it: `closed` (standard input), `output` or `processes` (limits).

    Args:
        child: the child's process id.
        output: the output of the child and its children.
        statuses: a mapping that collects exit statuses by process id.
        max_processes: the maximum number of the child's processes.
    """
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)  # SIG_IGN would not wake `select`
    look = 0.0
    while True:
        _reap(statuses)  # also children that ended before the handler was set
        if child in statuses:
            return None
        if time.monotonic() > look:
            look = time.monotonic() + _LOOK_SECONDS
            if sum(1 for _ in _descendants(os.getpid())) > max_processes:
                return "processes"
        ready, _, _ = select.select([0, woken, output.pipe], [], [], _LOOK_SECONDS)
        if 0 in ready and not os.read(0, 1):
            return "closed"
        if woken in ready:
            os.read(woken, _CHUNK)
        if output.pipe in ready:
            output.copy()
            if output.left < 0:
                return "output"


def _reap(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _end_all(statuses: dict[int, int]) -> None:
    """Kill every descendant, and wait until none is left. All are stopped first, so that they start no further processes."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        seen: set[int] = set()
        while fresh := {*_descendants(os.getpid())} - seen:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            seen |= fresh
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            statuses.setdefault(pid, os.waitstatus_to_exitcode(status))


def _descendants(pid: int) -> Iterator[int]:
    """Yield the process ids of all descendants of a process."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - importing pathlib takes longer than the rest
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
                for child in map(int, file.read().split()):
                    yield child
                    yield from _descendants(child)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    # Ray kills the children of a process that it ends. It then kills the waiting parent here, and the forked child ends the program.
    if os.fork():
        os.wait()
    else:
        sys.stdout.write(json.dumps(main(*json.loads(sys.argv[1]))))
