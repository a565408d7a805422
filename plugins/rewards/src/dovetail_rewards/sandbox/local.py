"""Sandbox: runs programs on this machine, each isolated from the others; usable from several threads."""

from __future__ import annotations

import base64
import heapq
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Self, cast

from dovetail_rewards.sandbox.collect import OutputStreams
from dovetail_rewards.sandbox.errors import SandboxError, SandboxUnreachableError
from dovetail_rewards.sandbox.helper.wire import Level, Payload, Report, Request
from dovetail_rewards.sandbox.helper_process import HelperProcess, default_python
from dovetail_rewards.sandbox.levels import chosen_level, setup_for
from dovetail_rewards.sandbox.values import Program, ProgramLimits, ProgramVerdict, Result

_LIMITS = {
    "cpu": ProgramVerdict.TIMEOUT,
    "wall": ProgramVerdict.TIMEOUT,
    "memory": ProgramVerdict.MEMORY,
    "disk": ProgramVerdict.DISK_LIMIT,
}
_CLOCKS = (signal.SIGXCPU, signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM)
"""Timer signals, from the kernel's CPU limit or a program's own timers. A program that they end counts as timed out, not as crashed."""


_SEALED = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE
_ADD_SEALS = 1033


class Sandbox:
    """Runs untrusted programs on this machine.

    The first program starts a helper process, which uses only the standard library and has an empty environment. Each program runs in a
    fork of the helper that first drops all its privileges. When a program ends, none of its processes and files is left.

    Args:
        level: `auto` (`namespaces` or `bubblewrap`), or one of `LEVELS`.
        python: interpreter of the programs; None means this interpreter, without its packages.
        packages: directories with packages that programs may import.
        preload: modules imported once instead of by every program; saves no time under bubblewrap.
        folders: paths at the root, such as `/tests`, that are mapped to directories with the same name in a program's working directory.
        user: user id of the helper if this process is root; for tests.
        tried: whether to skip the check that the level works on this machine, for callers that have made this check or are part of it.

    Raises:
        SandboxError: the isolation level is not available.
    """

    def __init__(
        self,
        *,
        level: str = "auto",
        python: str | None = None,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        folders: Sequence[str] = (),
        user: int | None = None,
        tried: bool = False,
    ) -> None:
        self.level: Level = cast("Level", level) if tried else chosen_level(level, python)
        self._setup = setup_for(self.level, packages=packages, preload=preload, folders=folders)
        self._python = python or default_python()
        self._user = user
        self._helper: HelperProcess | None = None
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._slots = itertools.count()
        self._under_way: dict[socket.socket, Program] = {}

    def run(self, program: Program, limits: ProgramLimits) -> Result:
        """Run a program to its end and return the result.

        Raises:
            SandboxError: the sandbox could not be set up.
            SandboxUnreachableError: the helper did not answer, or no CPU core was free for the program.
        """
        with self._slot() as slot, ExitStack() as stack:
            request = _request(limits, slot)
            streams = self._begin(program, request, limits, stack)
            told, cut = streams.read()
            if not told:
                raise SandboxUnreachableError(
                    "the sandbox's helper sent no report on the program; the helper may have ended"
                )
            report = cast("Report", json.loads(told))
            return result_from(report, streams, cut=cut)

    def cancel(self, program: Program) -> None:
        with self._lock:
            for status, running in self._under_way.items():
                if running is program:
                    _leave(status)

    def close(self) -> None:
        """End the helper and all running programs; the next run starts another helper."""
        with self._lock:
            for status in self._under_way:
                _leave(status)
            if self._helper is not None:
                self._helper.close()
                self._helper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(
        self, program: Program, request: Request, limits: ProgramLimits, stack: ExitStack
    ) -> OutputStreams:
        """Send a request to the helper, and return the program's output streams."""
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(status)
        with self._lock:
            self._under_way[status] = program
        stack.callback(self._over, status)
        with theirs, ExitStack() as sent:
            channel = program.channel
            stdin = _sealed(program.stdin, sent) if channel is None else channel.fileno()
            payload = _sealed(json.dumps(_payload(program)).encode(), sent)
            ends = [os.pipe(), os.pipe()]
            for reading, writing in ends:
                stack.callback(os.close, reading)
                sent.callback(os.close, writing)
            writing_ends = [writing for _, writing in ends]
            self._live_helper().send(request, [theirs.fileno(), stdin, *writing_ends, payload])
        return OutputStreams(
            status, stdout=ends[0][0], stderr=ends[1][0], limit=limits.output, wall_s=limits.wall
        )

    def _over(self, status: socket.socket) -> None:
        with self._lock:
            self._under_way.pop(status, None)

    def _live_helper(self) -> HelperProcess:
        with self._lock:
            if self._helper is None or not self._helper.alive():
                if self._helper is not None:
                    self._helper.close()
                self._helper = HelperProcess(self._python, self._setup, user=self._user)
            return self._helper

    @contextmanager
    def _slot(self) -> Iterator[int]:
        """Reserve a slot (see `Request.slot`) within the block: the lowest index, from 0, that no other run uses."""
        with self._lock:
            slot = heapq.heappop(self._free) if self._free else next(self._slots)
        try:
            yield slot
        finally:
            with self._lock:
                heapq.heappush(self._free, slot)


def _leave(status: socket.socket) -> None:
    """Shut down a run's status socket, so that the helper ends the run."""
    with suppress(OSError):  # the run has already ended
        status.shutdown(socket.SHUT_RDWR)


def _request(limits: ProgramLimits, slot: int) -> Request:
    return Request(
        slot=slot,
        cpu_s=limits.cpu_s,
        wall_s=limits.wall,
        memory=limits.memory,
        processes=limits.processes,
        open_files=limits.open_files,
        file_size=limits.file_size,
        disk=limits.disk,
    )


def _payload(program: Program) -> Payload:
    files = {name: base64.b64encode(data).decode() for name, data in program.files.items()}
    if program.source is None:
        return Payload(argv=list(program.argv), files=files)
    return Payload(source=program.source, files=files)


def _sealed(data: bytes, stack: ExitStack) -> int:
    """Return a descriptor of an in-memory file with the data, sealed against changes."""
    import fcntl

    try:
        fd = os.memfd_create("dovetail", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise SandboxError(
            f"the in-memory file of a program's input can't be created: {error}"
        ) from error
    stack.callback(os.close, fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _ADD_SEALS, _SEALED)
    return fd


def result_from(report: Report, streams: OutputStreams, *, cut: bool) -> Result:
    """Return the Result of a program from the helper's report and the output.

    Args:
        report: the helper's report.
        streams: the program's output, read to the end.
        cut: whether the output exceeded its limit.

    Raises:
        SandboxError: the sandbox could not be set up.
        SandboxUnreachableError: no CPU core was free for the program within a multiple of its time limit.
    """
    if report["fault"] is not None:
        errors = streams.stderr.decode("utf-8", "replace").strip()
        raise SandboxError(
            f"the sandbox could not be set up: {report['fault']}{f' ({errors})' if errors else ''}"
        )
    if report["ended"] == "starved":
        raise SandboxUnreachableError(
            f"a program waited for a CPU core for most of {report['wall_s']:.0f} s: all cores were busy"
        )
    status = report["status"]
    verdict = _verdict(status, report, streams.stderr, cut=cut)
    by_signal = status is not None and os.WIFSIGNALED(status)
    return Result(
        verdict=verdict,
        exit_status=None if status is None or by_signal else os.WEXITSTATUS(status),
        signal=os.WTERMSIG(status) if status is not None and by_signal else None,
        stdout=streams.stdout,
        stderr=streams.stderr,
        cpu_s=report["cpu_s"],
        wall_s=report["wall_s"],
        peak_memory=report["peak_memory"],
    )


def _verdict(status: int | None, report: Report, stderr: bytes, *, cut: bool) -> ProgramVerdict:
    if cut:
        return ProgramVerdict.OUTPUT_LIMIT
    if status is None:
        return _LIMITS[report["ended"] or "wall"]
    if os.WIFSIGNALED(status):
        return ProgramVerdict.TIMEOUT if os.WTERMSIG(status) in _CLOCKS else ProgramVerdict.CRASHED
    if os.WEXITSTATUS(status) == 0:
        return ProgramVerdict.OK
    last = stderr.rstrip().rpartition(b"\n")[2]
    return ProgramVerdict.MEMORY if last.startswith(b"MemoryError") else ProgramVerdict.FAILED
