"""The checkpoint store's use of the disk: locks, fsync, free space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import CheckpointError, DovetailError, causes
from dovetail.file_locks import lock

NEARLY_NOTHING = 64 * 1024
"""Free bytes below which a disk counts as full, whatever error a library raised."""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory within the block; the system releases the lock if this process dies."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        lock(handle)  # no effect on a file system without locks: run only one writer there
        yield
    finally:
        os.close(handle)


def is_held(directory: Path) -> bool:
    """Return whether a living process holds the directory's lock. Also true if the directory is gone: there is nothing to remove then."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return lock(handle) is False
    finally:
        os.close(handle)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert an OSError within the block to a CheckpointError that names the operation."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DovetailError):
            raise
        raise CheckpointError(f"{what}: {error}") from error


def is_full(error: BaseException, free: int) -> bool:
    """Return whether a full disk caused an error, even if a library wrapped the cause in its own exception.

    Also true if the disk now has fewer than `NEARLY_NOTHING` free bytes; `free` is the number of free bytes.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        if "no space left on device" in str(cause).lower():
            return True
    return free < NEARLY_NOTHING


def free_bytes(path: Path) -> int:
    """Return the free bytes of a path's disk; if the path does not exist, of its nearest existing parent's disk."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def sync(path: Path) -> None:
    """Write the cached data of a file or directory to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def readable(count: int) -> str:
    """Return a number of bytes as text, such as `1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
        size /= 1024
    return f"{size:.1f} TiB"


def write_whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary directory to fill, then rename this to `directory`, replacing an existing one.

    Raises:
        CheckpointError: a file exists at the directory's path.
    """
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(
            f"the model can't be written to {directory}: that is a file; expected a folder",
            hint="move the file away",
        )
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
