"""Watches the time, memory and disk use of one run's processes, and kills them."""
# The helper imports little to start fast, and works with descriptors: no pathlib.
# ruff: noqa: PTH106, PTH208

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import signal
import stat
import tempfile
import time
from collections.abc import Iterator

from .wire import Request

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PREFIX = "dovetail-sandbox-"
_STARVED = 10
"""Multiple of the wall-clock limit after which a run is ended as `starved`: the limit excludes time spent waiting for a core, and so
much waiting is a failure of the machine."""
MOST_FILES = 10_000
"""Maximum number of files and directories of one run."""


class Watch:
    """Measures the resources that a sandboxed program uses, and compares them with its limits.

    Args:
        request: the request, with its limits.
        procfs: a descriptor of the /proc that shows the supervisor's process namespace.
        disk: the directory whose size is limited; None if the kernel limits the size.
        box: the in-memory file system whose files are counted; None if the kernel limits their number.
    """

    def __init__(self, request: Request, procfs: int, *, disk: str | None, box: str | None) -> None:
        self._request = request
        self._procfs = procfs
        self._disk = disk
        self._box = box
        self._began = self._next_scan = time.monotonic()
        self.peak = 0
        self.cpu_s = 0.0
        self.delay_s = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds since the program's run began."""
        return time.monotonic() - self._began

    def reason(self) -> str | None:
        """Return the name of a limit that the program exceeds now, or None."""
        if self.wall_s > _STARVED * self._request["wall_s"]:
            return "starved"
        cpu, memory, files = cpu_of_children(), 0, 0
        for pid in descendants(self._procfs, os.getpid()):
            files = max(files, self._files_in_box(pid))
            times, pages, delay = self._figures(pid)
            cpu += times
            memory += pages
            self.delay_s = max(self.delay_s, delay)
        self.peak, self.cpu_s = max(self.peak, memory), max(self.cpu_s, cpu)
        if cpu > self._request["cpu_s"]:
            return "cpu"
        if memory > self._request["memory"]:
            return "memory"
        # Time spent waiting for a core does not count.
        if self.wall_s - self.delay_s > self._request["wall_s"]:
            return "wall"
        return "disk" if files > MOST_FILES or self._disk_is_full() else None

    def _disk_is_full(self) -> bool:
        """Return whether the directory exceeds its size limit. Scans are so rare that they take at most a tenth of the time."""
        if self._disk is None or time.monotonic() < self._next_scan:
            return False
        began = time.monotonic()
        used = occupied(self._disk) + held(self._procfs, descendants(self._procfs, os.getpid()))
        full = used > self._request["disk"]
        self._next_scan = began + 10 * (time.monotonic() - began)
        return full

    def _files_in_box(self, pid: int) -> int:
        if self._box is None:
            return 0
        try:
            fd = os.open(f"{pid}/root{self._box}", os.O_PATH, dir_fd=self._procfs)
        except OSError:
            return 0
        try:
            found = os.fstatvfs(fd)
        finally:
            os.close(fd)
        return found.f_files - found.f_ffree

    def _figures(self, pid: int) -> tuple[float, int, float]:
        """Return a process's CPU seconds with those of its ended children, its resident bytes, and its seconds of waiting for a core."""
        try:
            fields = _read(self._procfs, f"{pid}/stat").rpartition(")")[2].split()
        except OSError:
            return 0.0, 0, 0.0
        delay = 0.0
        with contextlib.suppress(OSError, IndexError, ValueError):
            delay = int(_read(self._procfs, f"{pid}/schedstat").split()[1]) / 1e9
        return sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE, delay


def cpu_of_children() -> float:
    """Return the CPU seconds of terminated children that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def descendants(procfs: int, pid: int) -> Iterator[int]:
    """Yield the process ids of all descendants of process `pid`; `procfs` is a descriptor of /proc."""
    try:
        threads = os.listdir(task := os.open(f"{pid}/task", os.O_RDONLY, dir_fd=procfs))
        os.close(task)
    except OSError:
        return
    for thread in threads:
        with contextlib.suppress(OSError):
            for child in map(int, _read(procfs, f"{pid}/task/{thread}/children").split()):
                yield child
                yield from descendants(procfs, child)


def occupied(directory: str) -> int:
    """Return the bytes on disk below a directory; with over MOST_FILES files, a number above any limit."""
    total, files, folders = 0, 0, [directory]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                files += 1
                if files > MOST_FILES:
                    return 1 << 62
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


def held(procfs: int, pids: Iterator[int]) -> int:
    """Return the bytes of deleted files that these processes hold open and that this user may see; `procfs` is a descriptor of /proc."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        for number in _descriptors(procfs, pid):
            with contextlib.suppress(OSError):
                file = os.stat(f"{pid}/fd/{number}", dir_fd=procfs)
                if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                    found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def _descriptors(procfs: int, pid: int) -> list[str]:
    try:
        directory = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=procfs)
    except OSError:
        return []
    try:
        return os.listdir(directory)
    except OSError:
        return []
    finally:
        os.close(directory)


def end_all(procfs: int) -> None:
    """Kill every descendant of this process, which must be a subreaper, and wait until no descendant is left.

    Args:
        procfs: a descriptor of /proc.
    """
    while True:
        for pid in list(descendants(procfs, os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def make_directory(base: str) -> tuple[str, int]:
    """Create and lock a temporary directory below `base`; return its path, and a descriptor that holds the lock.

    The kernel releases the lock when this process and its children have ended, even if they were killed. `remove_stale` then removes the
    directory.
    """
    while True:
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        # Another helper may remove the directory before it is locked.
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(folder, fcntl.LOCK_EX)
            if os.fstat(folder).st_nlink:
                return directory, folder
            os.close(folder)


def remove_stale(base: str, procfs: int) -> None:
    """Remove the temporary directories that killed supervisors left in `base`. A supervisor is the process that watches one program.

    A directory whose supervisor still runs is locked, and is not removed; nor is one that this user may not remove.

    Args:
        base: the directory that contains the temporary directories.
        procfs: a descriptor of /proc.
    """
    for name in os.listdir(base):
        if re.fullmatch(f"{_PREFIX}[a-z0-9_]{{8}}", name):  # the names that mkdtemp generates
            with contextlib.suppress(OSError):
                folder = os.open(f"{base}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(f"{base}/{name}", os.dup(folder), procfs)
                finally:
                    os.close(folder)


def remove(directory: str, top: int, procfs: int) -> None:
    """Remove a directory and everything below it, at any depth and with any file modes, without following links.

    Every nested directory is first moved up to the top under a random name, so that paths stay short and no descriptor per level is
    needed. The names are drawn after all programs have ended, so that no program could take a name before.

    Args:
        directory: the path of the directory.
        top: a descriptor of the directory, opened before any program ran.
        procfs: a descriptor of /proc.
    """
    os.fchmod(top, 0o700)
    while names := os.listdir(top):
        for name in names:
            if _unlinked(name, top, procfs):
                continue
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for child in os.listdir(inner):
                if not _unlinked(child, inner, procfs):
                    new = f".moved-{os.urandom(8).hex()}"
                    os.rename(child, new, src_dir_fd=inner, dst_dir_fd=top)
            os.close(inner)
            os.rmdir(name, dir_fd=top)
    os.close(top)
    os.rmdir(directory)


def _unlinked(name: str, folder: int, procfs: int) -> bool:
    """Remove the file `name` and return True; if `name` is a directory, make it accessible and return False."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        # Use the descriptor, since chmod by name would follow a link.
        os.chmod(f"self/fd/{inner}", 0o700, dir_fd=procfs)
        os.close(inner)
        return False
    return True


def _read(directory: int, path: str) -> str:
    fd = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(fd, 1 << 16).decode("utf-8", "replace")
    finally:
        os.close(fd)
