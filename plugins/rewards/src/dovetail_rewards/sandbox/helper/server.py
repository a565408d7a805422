"""The helper process: takes requests on a socket and forks a supervisor for each.

The helper holds no data that a program could steal: programs, inputs and outputs are passed as descriptors, which it does not read, and
its environment is empty. Python programs run in a confined fork of the helper, which saves the interpreter's start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

from . import confine, jail, landlock, namespaces, seccomp, syscalls as sc, watch
from .supervise import Supervisor
from .wire import SandboxSetup

_WARM = (
    "bisect collections copy datetime decimal fractions functools heapq io itertools json math operator random re "
    "statistics string time traceback typing"
)
"""Modules that competition programs often import; the helper loads them once for all programs."""
_MOST_BYTES, _DESCRIPTORS = 1 << 14, 5


def prepare(setup: SandboxSetup, procfs: int) -> list[str]:
    """Prepare this process as the parent of every program, and return the paths that programs may read.

    Raises:
        OSError: the isolation level is not available on this machine.
    """
    if reason := seccomp.supported():
        raise OSError(reason)
    readable = jail.readable(setup["readable"])
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    sys.path += setup["packages"]
    for name in (*_WARM.split(), *setup["preload"]):
        importlib.import_module(name)
    if setup["level"] == "namespaces":
        namespaces.enter_jail(procfs, readable, setup["folders"])
    elif setup["level"] == "subprocess":
        if os.geteuid() != 0:
            # Programs run under the helper's user id. This flag keeps them from the helper's memory and files in /proc.
            sc.prctl(sc.SET_DUMPABLE, 0)
        if landlock.version() == 0:
            raise OSError(
                "this kernel has no Landlock: it needs Linux 5.13 or newer, with Landlock enabled"
            )
        watch.remove_stale(setup["base"], procfs)
    # Programs run in forks. Without the freeze, a garbage collection in a fork would write to, and so copy, shared pages.
    gc.collect()
    gc.freeze()
    return readable


def main() -> None:
    """Run programs until the control socket's other end is closed; the arguments are the set-up as JSON and the socket's descriptor."""
    setup: SandboxSetup = json.loads(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    procfs = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        users = confine.private_users()
        readable = prepare(setup, procfs)
    except BaseException as error:  # noqa: BLE001 - told to the caller, whatever it is
        control.send(f"{type(error).__name__}: {error}".encode())
        return
    control.send(b"ready")
    # Let the kernel reap the supervisors. Each supervisor restores SIGCHLD, to wait for its own children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, _DESCRIPTORS)
        if not message:
            return
        with contextlib.suppress(
            OSError
        ):  # if the fork fails, the caller sees its status socket close
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request = json.loads(message)
                user = None if users is None else users + request["slot"] % confine.SLOTS
                Supervisor(
                    setup,
                    request,
                    descriptors=descriptors,
                    procfs=procfs,
                    readable=readable,
                    user=user,
                ).run()
        for fd in descriptors:
            os.close(fd)
