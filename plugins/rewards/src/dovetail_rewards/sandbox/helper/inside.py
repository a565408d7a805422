"""The first process of a sandbox, which starts the program, adopts its orphans, and reports how it ended."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import NoReturn

from . import confine, jail, program, syscalls as sc
from .wire import Request, SandboxSetup

FAULT = b"!"
"""First byte of a report that the program could not start; the reason follows."""
STATUS = struct.Struct("<xi")
STDIN, STDOUT, STDERR, PAYLOAD, REPORT = range(5)
"""The descriptor numbers in the sandbox's first process and its children. PAYLOAD has the program and its files as JSON; the first
process writes to REPORT how the program ended."""


def place(descriptors: list[int]) -> None:
    """Move the descriptors of stdin, stdout, stderr, payload and report to the numbers 0–4, and close all other descriptors."""
    # Move all to higher numbers first, since a target number may belong to a descriptor that is not moved yet.
    free = max(len(descriptors), *descriptors) + 1
    for offset, fd in enumerate(descriptors):
        os.dup2(fd, free + offset, inheritable=True)
    for target in range(len(descriptors)):
        os.dup2(free + target, target, inheritable=True)
    os.closerange(len(descriptors), 1 << 20)


def first_process(
    setup: SandboxSetup, request: Request, *, user: int | None, readable: list[str]
) -> NoReturn:
    """Start the program, wait for it, and report its exit status. Processes that the program left running are killed afterwards."""
    try:
        pid = os.fork()
    except OSError as error:
        fault(error)
    if pid == 0:
        _become(setup, request, user, readable)
    for fd in (STDIN, STDOUT, STDERR, PAYLOAD):
        os.close(fd)
    while True:
        ended, status = os.wait()
        if ended == pid:
            os.write(REPORT, STATUS.pack(status))
            os._exit(0)


def _become(
    setup: SandboxSetup, request: Request, user: int | None, readable: list[str]
) -> NoReturn:
    """Confine this process and run the program in it."""
    try:
        os.setsid()
        payload = program.read(PAYLOAD)
        confine.confine(setup, request, user=user, readable=readable)
        program.write_files(payload)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program must not run
        fault(error)
    os.close(REPORT)
    program.run(payload, setup["packages"])


def fault(error: BaseException) -> NoReturn:
    """Report why the program could not start, and exit."""
    os.write(REPORT, FAULT + f"{type(error).__name__}: {error}"[:2000].encode())
    os._exit(1)


def main() -> NoReturn:
    """Run a program under bubblewrap; the argument is a JSON list of set-up, request, private user and readable paths."""
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        setup, request, user, readable = json.loads(sys.argv[1])
        os.chdir(jail.WORK)
        sc.prctl(sc.SET_PDEATHSIG, signal.SIGKILL)
    except BaseException as error:  # noqa: BLE001
        fault(error)
    first_process(setup, request, user=user, readable=readable)
