"""RendezvousDirectory: the private directory in which sender and receivers of a run meet, and its removal.

Every member process holds a shared lock on the file `members`, which the kernel releases when the process ends. A
directory whose lock no process holds belongs to a dead run: the next process to join, or the last to leave, removes it. Each
receiver listens at a socket in the directory.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from dovetail.errors import ConfigError, WeightSyncError

_MEMBERS = "members"
_NAMED = re.compile(r"[0-9a-f]{16}")
_SOCKET = ".sock"
_NOTE = ".off"
_LONGEST_ADDRESS = 107
"""Maximum bytes of a Unix socket's path (sun_path in unix(7))."""
_BACKLOG = 64


def default_root() -> Path:
    """Return the directory below which each run makes its rendezvous directory, if the config sets no `directory`."""
    memory = Path("/dev/shm")  # noqa: S108 - only the directory below it is used, which must be this user's own
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"dovetail-{os.getuid()}"


class RendezvousDirectory:
    """Membership of this process in a run's private directory, which holds the sockets by which sender and receivers connect.

    Args:
        root: the directory with the private directories of all runs of this user.
        key: a text that both sides know, such as the run directory's path; it determines the private directory's name.
        notes: the directory for notes on called-off updates, which all machines of a run share; None for the private directory.

    Raises:
        WeightSyncError: the root can't be made, or another user owns it or has access.
        ConfigError: the path is too long for a socket.
    """

    def __init__(self, root: Path, key: str, notes: Path | None = None) -> None:
        self.root = root
        self.directory = root / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._notes = notes or self.directory
        longest = len(os.fsencode(self.directory)) + 48
        if longest > _LONGEST_ADDRESS:
            raise ConfigError(
                f"rollout.weight_transport.directory={str(root)!r} is too long: paths of sockets below it would have "
                f"{longest} bytes; expected at most {_LONGEST_ADDRESS}",
                hint="leave it out, or set a shorter path",
            )
        _make_private(root)
        remove_dead(root)
        self._lock = self._join()
        self._sockets: list[Path] = []
        # A finalizer, so that the files are removed even if `leave` is not called before the process ends.
        self.leave = weakref.finalize(
            self, _leave, self._lock, self._sockets, self.directory, os.getpid()
        )
        """Remove the files of this process, and the directory if no other process uses it; safe to call twice."""

    def listen(self, who: str) -> socket.socket:
        """Return a listening socket in the directory, named after `who` (its first 20 letters) and the process."""
        name = f"{re.sub(r'[^A-Za-z0-9.]', '_', who)[:20]}-{os.getpid()}-{secrets.token_hex(4)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The socket gets its name only when it listens: a socket that refuses connections counts as a dead process's.
            listener.bind(str(self.directory / name))
            os.chmod(self.directory / name, 0o600)  # noqa: PTH101 - reads as the system call it is
            listener.listen(_BACKLOG)
            path = self.directory / f"{name}{_SOCKET}"
            (self.directory / name).rename(path)
        except OSError:
            listener.close()
            raise
        self._sockets.append(path)
        return listener

    def receivers(self) -> list[Path]:
        """Return the paths of receivers' sockets in the directory, in the order of their names."""
        return sorted(self.directory.glob(f"*{_SOCKET}"))

    def call_off(self, update_id: str, reason: str) -> None:
        """Write a note for an update's sender, with the reason why a receiver will not connect."""
        note = self._notes / f"{update_id}{_NOTE}"
        draft = note.with_suffix(f".{secrets.token_hex(4)}")
        draft.write_text(reason, encoding="utf-8")
        draft.rename(note)  # readers never see a partial note

    def called_off(self, update_id: str) -> str | None:
        """Return the note that `call_off` wrote for this update; None if there is no note."""
        try:
            return (self._notes / f"{update_id}{_NOTE}").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def forget(self, update_id: str) -> None:
        """Remove the note of an update."""
        (self._notes / f"{update_id}{_NOTE}").unlink(missing_ok=True)

    def _join(self) -> int:
        import fcntl  # here, since a plan loads this module even on systems without fcntl

        while True:
            try:
                self.directory.mkdir(mode=0o700, exist_ok=True)
                lock = _open_members(self.directory)
            except FileNotFoundError:
                _make_private(self.root)
                continue  # a leaving process has just removed the directory
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_there(lock, self.directory):
                return lock
            os.close(lock)


def who_of(path: Path) -> str:
    """Return a receiver's name for messages from its socket's path, such as `rollout.1 (process 123)`."""
    who, process, _ = path.name.removesuffix(_SOCKET).rsplit("-", 2)
    return f"{who} (process {process})"


def remove_dead(root: Path) -> None:
    """Remove the directories of runs whose processes have all ended."""
    for directory in root.iterdir():
        if _NAMED.fullmatch(directory.name):
            _remove_if_dead(directory)


def _leave(lock: int, sockets: list[Path], directory: Path, process: int) -> None:
    if os.getpid() != process:
        return  # a fork of a member is not a member
    for path in sockets:
        path.unlink(missing_ok=True)
    os.close(lock)
    _remove_if_dead(directory)


def _remove_if_dead(directory: Path) -> None:
    import fcntl

    try:
        lock = _open_members(directory)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_there(lock, directory):
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _open_members(directory: Path) -> int:
    return os.open(directory / _MEMBERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_there(lock: int, directory: Path) -> bool:
    """Return whether the locked file is still the file in the directory.

    The last member may have removed the directory after this process opened the file and before it locked the file.
    """
    try:
        return os.path.samestat(os.fstat(lock), (directory / _MEMBERS).stat())
    except FileNotFoundError:
        return False


def _make_private(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise WeightSyncError(
            f"the weight transport can't create the directory {root}: {error}",
            hint="set rollout.weight_transport.directory to a directory that can be created",
        ) from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not root.is_dir():
        raise WeightSyncError(
            f"{root} is refused: it is not a directory that only user {os.getuid()} can enter "
            f"(owner {found.st_uid}, mode {found.st_mode & 0o777:o})",
            hint="remove it, or set rollout.weight_transport.directory to another path",
        )
