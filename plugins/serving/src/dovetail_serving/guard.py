"""A small program between a rollout and the server that it starts: it ends the server when the rollout ends.

Run as `python guard.py COMMAND…` with a pipe as standard input. The command runs in its own process group. The guard ends the whole
group, first by SIGTERM, then by SIGKILL, when the pipe closes or a signal arrives. The pipe closes when the rollout closes it or dies.
If the command ends first, the guard ends the rest of the group. The guard imports only the standard library, to start at once.

The guard consists of two processes. The process that the rollout starts passes signals on and reports how the command ended; its child
watches the pipe and the command. If Ray kills a dying rollout's children, the watching process is not among them and can do its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 10.0
"""Seconds from the first signal to SIGKILL."""
_PR_SET_PDEATHSIG = 1
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(command: list[str]) -> int:
    """Run `keep` for the command in a child process, and pass signals on to that child.

    Returns:
        The command's exit status as in a shell: 128 + n if signal n ended the command.
    """
    child = os.fork()
    if not child:
        return keep(command)

    def hand_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _ASKING:
        signal.signal(number, hand_on)
    _, ended = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    return status if status >= 0 else 128 - status


def keep(command: list[str]) -> int:
    """Run the command until it ends; end it if a signal arrives or the pipe at standard input closes.

    Returns:
        The command's exit status as in a shell: 128 + n if signal n ended the command.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    asked = False

    def ask(_signal: int, _frame: object) -> None:
        nonlocal asked
        asked = True

    for number in _ASKING:
        signal.signal(number, ask)
    # Even an empty handler makes SIGCHLD write to the wake-up descriptor; an ignored signal would not.
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    child = subprocess.Popen(  # noqa: S603 - our parent's words
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has one thread
    )
    while child.poll() is None and not asked:
        ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [])
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            break
        if woken in ready:
            os.read(woken, 4096)
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while child.poll() is None and (left := deadline - time.monotonic()) > 0:
            if select.select([woken], [], [], left)[0]:
                os.read(woken, 4096)
    _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _end_with_parent() -> None:
    """Have the kernel kill the command if the watching process is killed; runs in the command's process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
