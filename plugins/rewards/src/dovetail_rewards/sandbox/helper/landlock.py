"""Landlock: restricts the files that a process may access, without privileges (Linux 5.13; signals and abstract sockets from 6.12)."""
# The helper imports little to start fast, and works with descriptors: no pathlib.
# ruff: noqa: PTH112

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from .syscalls import SET_NO_NEW_PRIVS, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
"""Rights that are valid for a rule on a file; other rights need a directory."""


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "net", "scoped")]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def version() -> int:
    """Return the kernel's Landlock version; 0 if the kernel has no Landlock."""
    try:
        return syscall("landlock", _CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process and its children to these paths and everything below, and forbid TCP and signals to other processes.

    Missing paths are skipped: a broken link grants nothing.
    """
    abi = version()
    handled = (1 << 13) - 1  # all rights of Landlock version 1
    handled |= (1 << 13) if abi >= 2 else 0  # the right to move files between directories
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL if abi >= 5 else 0
    ruleset = _Ruleset(handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = syscall("landlock ruleset", _CREATE, ctypes.byref(ruleset), size, 0)
    for path in readable:
        _allow(rules, path, handled & (_EXECUTE | _READ | _LIST))
    for path in writable:
        _allow(rules, path, handled & ~_IOCTL)
    prctl(SET_NO_NEW_PRIVS, 1)
    syscall("landlock", _RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = _PathRule(access if os.path.isdir(path) else access & _FILES, fd)
        syscall(f"landlock rule for {path}", _ADD, rules, 1, ctypes.byref(rule), 0)
    finally:
        os.close(fd)
