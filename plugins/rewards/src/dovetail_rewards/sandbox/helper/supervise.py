"""Supervises one run: prepares its directory and limits, starts it, watches it, kills all its processes, and reports."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from typing import NoReturn

from . import inside, jail, namespaces, syscalls as sc, watch
from .wire import Report, Request, SandboxSetup

_FIRST_TICK, _LAST_TICK = 0.01, 0.05


class Supervisor:
    """Runs one program in a separate process: starts the program, enforces its limits, kills what it leaves, and reports its end.

    Args:
        setup: the confinement that every program of the helper gets.
        request: the request to run the program.
        descriptors: the descriptors of the status socket, stdin, stdout, stderr and the payload (the program and its files).
        procfs: a descriptor of /proc.
        readable: the paths that programs may read.
        user: the program's private user id; None if the helper is not root.
    """

    def __init__(
        self,
        setup: SandboxSetup,
        request: Request,
        *,
        descriptors: list[int],
        procfs: int,
        readable: list[str],
        user: int | None,
    ) -> None:
        self._setup = setup
        self._request = request
        self._status = socket.socket(fileno=descriptors[0])
        self._streams = descriptors[1:]
        self._procfs = procfs
        self._readable = readable
        self._user = user
        self._directory: str | None = None
        self._folder = -1

    def run(self) -> NoReturn:
        """Run the program under its limits, report the result, and end this process."""
        report = Report(status=None, ended=None, cpu_s=0.0, wall_s=0.0, peak_memory=0, fault=None)
        try:
            self._run(report)
        except BaseException as error:  # noqa: BLE001 - told to the caller, whatever it is
            report["fault"] = f"{type(error).__name__}: {error}"
        try:
            self._clean(report)
        except BaseException as error:  # noqa: BLE001
            report["fault"] = f"clean-up failed: {type(error).__name__}: {error}"
        try:
            self._status.send(json.dumps(report).encode())
        finally:
            os._exit(0)

    def _run(self, report: Report) -> None:
        sc.prctl(sc.SET_CHILD_SUBREAPER, 1)
        incoming, outgoing = os.pipe()
        if self._setup["level"] == "namespaces":
            namespaces.enter_run(self._procfs, self._request["disk"], self._user)
        elif self._setup["level"] == "subprocess":
            self._directory, self._folder = watch.make_directory(self._setup["base"])
            if self._user is not None:
                os.chown(self._directory, self._user, self._user)
        box = jail.BOX if self._setup["level"] == "bubblewrap" else None
        watched = watch.Watch(self._request, self._procfs, disk=self._directory, box=box)
        if os.fork() == 0:
            self._first_process(outgoing)
        for fd in (outgoing, *self._streams):
            os.close(fd)
        try:
            self._wait(incoming, watched, report)
        finally:
            report["wall_s"] = watched.wall_s
            report["cpu_s"], report["peak_memory"] = watched.cpu_s, watched.peak

    def _first_process(self, outgoing: int) -> NoReturn:
        """Set up descriptors and working directory of this forked child, and start the program."""
        try:
            sc.prctl(sc.SET_PDEATHSIG, signal.SIGKILL)
            os.chdir(self._directory or "/")
            inside.place([*self._streams, outgoing])
            if self._setup["level"] == "bubblewrap":
                command = namespaces.bubblewrap(
                    self._setup, self._request, user=self._user, readable=self._readable
                )
                os.execve(command[0], command, {})  # noqa: S606 - bubblewrap itself
            if self._setup["level"] == "namespaces":
                os.chdir(jail.WORK)
        except BaseException as error:  # noqa: BLE001
            inside.fault(error)
        inside.first_process(self._setup, self._request, user=self._user, readable=self._readable)

    def _wait(self, incoming: int, watched: watch.Watch, report: Report) -> None:
        """Wait until the program ends, exceeds a limit, or the caller cancels it."""
        poll = select.poll()
        poll.register(incoming, select.POLLIN)
        poll.register(self._status, select.POLLIN)
        tick = _FIRST_TICK
        while True:
            ready = [fd for fd, _ in poll.poll(tick * 1000)]
            if incoming in ready:
                _take(os.read(incoming, 1 << 12), report)
                return
            report["ended"] = "caller" if ready else watched.reason()
            if report["ended"]:
                return
            tick = min(2 * tick, _LAST_TICK)

    def _clean(self, report: Report) -> None:
        """Kill all processes of the run, and remove its files."""
        watch.end_all(self._procfs)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The kernel loses the times of processes that are killed with their namespace, so the watch's figures count too.
        report["cpu_s"] = max(report["cpu_s"], usage.ru_utime + usage.ru_stime)
        report["peak_memory"] = max(report["peak_memory"], usage.ru_maxrss << 10)
        if self._directory is not None:
            watch.remove(self._directory, self._folder, self._procfs)


def _take(data: bytes, report: Report) -> None:
    """Add the first process's report to the supervisor's report."""
    if len(data) == inside.STATUS.size and not data.startswith(inside.FAULT):
        report["status"] = inside.STATUS.unpack(data)[0]
    elif data:
        report["fault"] = data[1:].decode("utf-8", "replace")
    else:
        report["fault"] = "the sandbox's first process ended without a report"
