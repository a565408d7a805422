"""Builds the file system that confined programs see: interpreter and system libraries, read-only, and writable folders in memory."""
# The helper imports little to start fast, and works with descriptors: no pathlib.
# ruff: noqa: PTH102, PTH103, PTH112, PTH114, PTH115, PTH120, PTH211

from __future__ import annotations

import os
import sys

from . import syscalls as sc
from .watch import MOST_FILES

BOX = "/box"
WORK = f"{BOX}/work"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {"/tmp": f"{BOX}/tmp", "/dev/shm": f"{BOX}/shm", "/dev/fd": "/proc/self/fd"}  # noqa: S108 - inside the jail
FOLDERS = ("work", "tmp", "shm")
"""The program's writable folders: the working directory, /tmp and /dev/shm."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/lib32",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_BASE = "/tmp"  # noqa: S108 - a mount of our own covers it, in our namespace alone


def readable(extra: list[str]) -> list[str]:
    """Return the existing paths that programs may read: system paths, the interpreter's directories and `extra`.

    A path below another one is left out. System paths may be symbolic links; in the other paths, links are resolved.
    """
    prefixes = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)]
    paths = [os.path.realpath(path) for path in (*prefixes, *extra)]
    wanted = sorted(path for path in {*_SYSTEM, *paths} if os.path.lexists(path) and path != "/")
    return [p for p in wanted if not any(p.startswith(f"{other}/") for other in wanted)]


def links(paths: list[str], folders: list[str]) -> dict[str, str]:
    """Return the symbolic links in a program's root file system: targets by path.

    Args:
        paths: the readable paths. A link that would replace a parent of one of them is left out.
        folders: paths at the root to link to the directories with the same name in the working directory.
    """
    return {
        link: target
        for link, target in {**_LINKS, **{each: f"{WORK}{each}" for each in folders}}.items()
        if not any(path.startswith(f"{link}/") for path in paths)
    }


def build(paths: list[str], folders: list[str]) -> None:
    """Give this process a new root file system, in which only the program's folders are writable.

    Args:
        paths: the paths of the present file system that programs may read.
        folders: paths at the root to link into the working directory; see `links`.

    Raises:
        OSError: the kernel refuses one of the mounts.
    """
    sc.mount("none", "/", None, sc.RECURSIVE | sc.PRIVATE)
    sc.mount("tmpfs", _BASE, "tmpfs", sc.NO_SUID | sc.NO_DEV, "mode=0755,size=1m")
    os.mkdir(f"{_BASE}/new", 0o755)
    os.mkdir(f"{_BASE}/old", 0o755)
    sc.pivot_root(_BASE, f"{_BASE}/old")
    os.chdir("/")
    sc.mount("/new", "/new", None, sc.BIND | sc.RECURSIVE)
    for path in paths:
        _bind(path)
    for path in DEVICES:
        _bind(path, devices=True)
    for folder in (BOX, "/dev"):
        os.makedirs(f"/new{folder}", 0o755, exist_ok=True)
    for link, target in links(paths, folders).items():
        os.symlink(target, f"/new{link}")
    os.chdir("/new")
    sc.pivot_root(".", ".")
    sc.unmount(".")
    os.chdir("/")
    sc.mount("none", "/", None, sc.REMOUNT | sc.BIND | sc.READ_ONLY | sc.NO_SUID | sc.NO_DEV)


def fill_box(size: int, user: int, group: int) -> None:
    """Mount an in-memory file system of `size` bytes at BOX, and create the program's FOLDERS in it, owned by this user and group."""
    data = f"mode=0755,size={size},nr_inodes={MOST_FILES}"
    sc.mount("tmpfs", BOX, "tmpfs", sc.NO_SUID | sc.NO_DEV, data)
    for name in FOLDERS:
        os.mkdir(f"{BOX}/{name}", 0o700)
        os.chown(f"{BOX}/{name}", user, group)


def _bind(path: str, *, devices: bool = False) -> None:
    """Bind-mount a path of the old root at the same path of the new root, read-only; a symbolic link is recreated.

    Args:
        path: an absolute path.
        devices: whether device files below the path can be opened.
    """
    old, new = f"/old{path}", f"/new{path}"
    os.makedirs(os.path.dirname(new), 0o755, exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), new)
        return
    if os.path.isdir(old):
        os.makedirs(new, 0o755, exist_ok=True)
    else:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o644))
    sc.mount(old, new, None, sc.BIND | sc.RECURSIVE)
    sc.seal_mounts(new, devices=devices)
