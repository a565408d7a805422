"""The messages between caller and helper: JSON, accompanied by file descriptors."""

from __future__ import annotations

from typing import Literal, TypedDict

Level = Literal["namespaces", "bubblewrap", "subprocess"]


class SandboxSetup(TypedDict):
    """The confinement that a sandbox's helper process applies to every program."""

    level: Level
    readable: list[str]
    """Directories that programs may read, such as those of importable packages."""
    packages: list[str]
    """Directories that are added to `sys.path`."""
    preload: list[str]
    """Modules imported once, before the first program."""
    folders: list[str]
    """Paths at the root, such as `/tests`, that are links to the directories with the same name in the working directory."""
    bwrap: str
    """Path of bubblewrap; empty at the other isolation levels."""
    base: str
    """The parent of temporary directories at the level `subprocess`, which has no private mounts."""


class Request(TypedDict):
    """A request to run one program, sent with the descriptors of status socket, stdin, stdout, stderr and payload."""

    slot: int
    """Index of the run, from 0, among the runs in progress. It selects one of the `confine.SLOTS` private user ids, modulo their number."""
    cpu_s: float
    wall_s: float
    memory: int
    """Memory limit in bytes; `file_size` and `disk` are in bytes, too."""
    processes: int
    open_files: int
    file_size: int
    disk: int


class Payload(TypedDict, total=False):
    """The program to run, read only by the process that will run it."""

    source: str
    """Python source; absent if `argv` is given."""
    argv: list[str]
    files: dict[str, str]
    """The contents of files, as base64, by relative path."""


class Report(TypedDict):
    """The helper's report on one program: how it ended, or why it could not start."""

    status: int | None
    """The wait status; None if the program was ended by the sandbox, or never started."""
    ended: str | None
    """Why the sandbox ended the program: the limit `wall`, `cpu`, `memory` or `disk`; `caller` (a cancellation); `starved` (no free core).

    None if the program ended by itself.
    """
    cpu_s: float
    wall_s: float
    peak_memory: int
    fault: str | None
    """The error that prevented the sandbox's set-up, or None."""
