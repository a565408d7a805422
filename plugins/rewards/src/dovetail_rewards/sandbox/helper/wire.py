"""The messages between caller and helper: JSON, with file descriptors."""

from __future__ import annotations

from typing import Literal, TypedDict

Level = Literal["namespaces", "bubblewrap", "subprocess"]


class SandboxSetup(TypedDict):
    """The confinement that a helper applies to all its runs."""

    level: Level
    readable: list[str]
    """Directories with packages that programs may import, and further ones that they may read."""
    packages: list[str]
    """Directories that are added to `sys.path`."""
    preload: list[str]
    """Modules imported once, before the first program."""
    folders: list[str]
    """Paths at the root that stand for those of the same name in the working directory, such as `/tests`."""
    bwrap: str
    """Path of bubblewrap; empty at other levels."""
    base: str
    """The directory for temporary directories, at the level without private mounts."""


class Request(TypedDict):
    """One run. It is sent with the descriptors status, stdin, stdout, stderr and payload."""

    slot: int
    """Number of the private user that the run gets; no other run has it at the same time."""
    cpu_s: float
    wall_s: float
    memory: int
    """Memory limit in bytes; the other sizes are in bytes, too."""
    processes: int
    open_files: int
    file_size: int
    disk: int


class Payload(TypedDict, total=False):
    """The program. Only the process that is about to run it reads it, already confined."""

    source: str
    """Python source; absent where `argv` is given."""
    argv: list[str]
    files: dict[str, str]
    """The content of files as base64, by relative path."""


class Report(TypedDict):
    """The report on a finished run."""

    status: int | None
    """The wait status; None where the program was ended, or never began."""
    ended: str | None
    """The reason for which the run was ended: wall, cpu, memory, disk, caller or starved."""
    cpu_s: float
    wall_s: float
    peak_memory: int
    fault: str | None
    """The error with which the sandbox could not be set up."""
