"""The inputs and results of a sandbox."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Protocol

import attrs

from dovetail_rewards.sandbox.errors import SandboxError

MIB = 1 << 20
_positive: Any = attrs.validators.gt(0)


@attrs.frozen(kw_only=True)
class ProgramLimits:
    """Limits on a program's resources: time, memory, processes and files."""

    cpu_s: float = attrs.field(default=4.0, validator=_positive)
    """Limit of CPU seconds of all the program's processes together."""
    wall_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    """Limit of wall-clock seconds, not counting time spent waiting for a core; None means three times `cpu_s`, plus 2."""
    memory: int = attrs.field(default=1024 * MIB, validator=attrs.validators.ge(32 * MIB))
    """Limit in bytes for the address space of each process, and for the resident memory of all processes together."""
    processes: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """Maximum number of processes and threads at once; 1 forbids new processes."""
    open_files: int = attrs.field(default=64, validator=attrs.validators.ge(16))
    """Maximum number of open files of each process."""
    file_size: int = attrs.field(default=16 * MIB, validator=_positive)
    """Maximum size of a file, in bytes."""
    disk: int = attrs.field(default=64 * MIB, validator=attrs.validators.ge(MIB))
    """Maximum size of all files together, in bytes."""
    output: int = attrs.field(default=MIB, validator=_positive)
    """Maximum bytes of standard output, and of standard error; a program that writes more is ended."""

    @property
    def wall(self) -> float:
        """The wall-clock limit in seconds: `wall_s`, or its default."""
        return 3 * self.cpu_s + 2 if self.wall_s is None else self.wall_s


@attrs.frozen(kw_only=True)
class Program:
    """Untrusted code: Python source, or a command."""

    source: str | None = None
    """Python source, run like `python solution.py` by the sandbox's interpreter."""
    argv: tuple[str, ...] = ()
    """A command and its arguments, instead of `source`."""
    stdin: bytes = b""
    """The program's standard input."""
    channel: socket.socket | None = None
    """A socket as standard input, instead of `stdin`; another program may hold the socket's other end."""
    files: Mapping[str, bytes] = attrs.field(factory=dict)
    """Contents of files in the program's working directory, by relative path."""

    def __attrs_post_init__(self) -> None:
        if (self.source is None) == (not self.argv):
            raise SandboxError(
                "a program needs exactly one of `source` and `argv`, but both or neither are set"
            )
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
                raise SandboxError(
                    f"file name {name!r} lies outside the program's working directory; expected a relative path without '..'"
                )


class ProgramVerdict(StrEnum):
    """How a program ended."""

    OK = "ok"
    """The program exited with status 0."""
    FAILED = "failed"
    """The program exited with another status, for example after an exception other than MemoryError."""
    CRASHED = "crashed"
    """The program was ended by a signal other than a timer's."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"


@attrs.frozen(kw_only=True)
class Result:
    """The result of a program run. Faults of the sandbox are exceptions instead."""

    verdict: ProgramVerdict
    """How the program ended."""
    exit_status: int | None = None
    """The program's exit status; None if a signal or a limit ended the program."""
    signal: int | None = None
    """The signal that ended the program; None if the program exited or a limit ended it."""
    stdout: bytes = b""
    """The first `ProgramLimits.output` bytes of standard output."""
    stderr: bytes = b""
    """The last 16 KiB of standard error."""
    cpu_s: float = 0.0
    """CPU seconds of all the program's processes, set-up included."""
    wall_s: float = 0.0
    """Wall-clock seconds from the start of the sandbox to the program's end."""
    peak_memory: int = 0
    """Peak resident memory in bytes: the larger of one process's peak and the measured peak of all processes together."""

    @property
    def ok(self) -> bool:
        """Whether the program exited by itself with status 0."""
        return self.verdict is ProgramVerdict.OK


class Runner(Protocol):
    """Runs programs in the sandbox of this machine or on a sandbox service."""

    def run(self, program: Program, limits: ProgramLimits) -> Result:
        """Run a program to its end and return the result; safe to call from many threads.

        Raises:
            SandboxError: the sandbox could not be started, so the program has no result.
        """
        ...

    def cancel(self, program: Program) -> None:
        """End every `run` call in progress for this Program object; each raises SandboxUnreachableError.

        On a sandbox service this does nothing: the service can't end a program before its time limit.
        """
        ...
