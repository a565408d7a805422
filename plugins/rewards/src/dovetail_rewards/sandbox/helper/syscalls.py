"""System calls that Python's standard library does not provide."""

from __future__ import annotations

import ctypes
import os
import platform

NEW_MOUNTS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NET = 0x40000000
ANY_NEW = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_USER | NEW_PIDS | NEW_NET | 0x02000000 | 0x80

READ_ONLY, NO_SUID, NO_DEV = 1, 2, 4
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
DETACH = 2

SET_PDEATHSIG, SET_DUMPABLE, SET_KEEPCAPS, CAPBSET_DROP = 1, 4, 8, 24
SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 36, 38

_MOUNT_SETATTR, _PIVOT_ROOT, _CAPSET = 442, 155, 126
if platform.machine() == "aarch64":
    _PIVOT_ROOT, _CAPSET = 41, 91
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
    """Return the result of a system call; raise OSError with its errno if the result is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a system call by number, and return its result. Integers are passed as longs, other values as ctypes converts them."""
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(_libc.syscall(ctypes.c_long(number), *longs), what)


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    """Set an attribute of this process, by the system call `prctl`."""
    longs = [ctypes.c_ulong(number) for number in (value, third, 0, 0)]
    checked(_libc.prctl(option, *longs), f"prctl({option}, {value})")


def unshare(flags: int) -> None:
    """Move this process into new namespaces; a new process namespace applies to its next children."""
    checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount a file system, or bind a path."""
    name = kind.encode() if kind else None
    result = _libc.mount(
        source.encode(), target.encode(), name, ctypes.c_ulong(flags), data.encode()
    )
    checked(result, f"mount of {source} on {target}")


def unmount(target: str) -> None:
    """Unmount (umount2(2)) lazily, with everything mounted below."""
    checked(_libc.umount2(target.encode(), DETACH), f"unmount of {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root directory, and mount the old root at `old`."""
    syscall(f"pivot_root to {new}", _PIVOT_ROOT, new.encode(), old.encode())


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def seal_mounts(target: str, *, devices: bool = False) -> None:
    """Make a mount and all mounts below it read-only and without set-uid programs (mount_setattr(2), Linux 5.12).

    Device files below the mount can be opened only if `devices` is set.
    """
    attributes = _MountAttributes(READ_ONLY | NO_SUID | (0 if devices else NO_DEV), 0, 0, 0)
    syscall(
        f"read-only mount of {target}",
        _MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def set_capabilities(mask: int) -> None:
    """Set exactly these effective and permitted capabilities, and no inheritable ones (capset(2))."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    syscall("capset", _CAPSET, ctypes.byref(header), ctypes.byref(data))
