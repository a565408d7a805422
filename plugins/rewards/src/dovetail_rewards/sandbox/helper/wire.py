"""What the caller and the helper tell each other, as JSON; file descriptors travel beside it."""

from __future__ import annotations

from typing import Literal, TypedDict

Level = Literal["namespaces", "bubblewrap", "subprocess"]


class SandboxSetup(TypedDict):
    """How a helper confines, for as long as it lives."""

    level: Level
    readable: list[str]
    """Directories with packages that programs may import, and further ones that they may read."""
    packages: list[str]
    """What is added to `sys.path`."""
    preload: list[str]
    """Modules imported once, before the first program."""
    folders: list[str]
    """Paths at the root that stand for those of the same name in the working directory, such as `/tests`."""
    bwrap: str
    """Path of bubblewrap; empty at other levels."""
    base: str
    """Where throw-away directories are made at the level without mounts of its own."""


class Request(TypedDict):
    """One run. Descriptors with it: status, stdin, stdout, stderr, payload."""

    slot: int
    """Which of the private users it gets; no other run has it at the same time."""
    cpu_s: float
    wall_s: float
    memory: int
    """Bytes, like the other sizes."""
    processes: int
    open_files: int
    file_size: int
    disk: int


class Payload(TypedDict, total=False):
    """The program. Only the process that is about to run it reads it, already confined."""

    source: str
    """Python source; or else `argv`."""
    argv: list[str]
    files: dict[str, str]
    """Relative path to content, as base64."""


class Report(TypedDict):
    """How a run went."""

    status: int | None
    """The wait status; None where the program was ended, or never began."""
    ended: str | None
    """Why it was ended: wall, cpu, memory, disk, caller, starved."""
    cpu_s: float
    wall_s: float
    peak_memory: int
    fault: str | None
    """What kept the sandbox from being set up."""
