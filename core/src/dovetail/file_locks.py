"""Locks on open files, which the system releases when the process ends, even by a kill."""

from __future__ import annotations

from types import ModuleType

from dovetail.errors import DovetailError


def lock(file: int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file, given by its descriptor, until it is closed or unlocked.

    Args:
        file: the descriptor of a file or directory.
        shared: whether to take a shared lock, which other processes may hold as well.
        wait: whether to wait until another process releases the lock.

    Returns:
        True if the file is locked now, False if another process holds the lock, None on a file system without locks.

    Raises:
        DovetailError: this system has no file locks (Windows).
    """
    fcntl = system_locks()
    # Not `lockf`: its exclusive locks need a file open for writing, which a directory can't be, and
    # they end as soon as this process closes any descriptor of the file.
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock(file: int) -> None:
    """Unlock a file before closing it: a process forked meanwhile shares the lock and would keep it."""
    fcntl = system_locks()
    fcntl.flock(file, fcntl.LOCK_UN)


def system_locks() -> ModuleType:
    """Return the module of the system's file locks.

    Raises:
        DovetailError: this system (Windows) has no file locks, which a run needs.
    """
    try:
        import fcntl
    except ImportError:
        raise DovetailError(
            "a run needs Linux or macOS: this system can't lock files (it lacks Python's module fcntl)",
            hint="`dovetail config`, `check`, `plan` and `plugins` work on this system, too",
        ) from None
    return fcntl
