"""Puts programs into Linux namespaces, made by this helper itself or by bubblewrap."""
# The helper imports little to start fast, and works with descriptors: no pathlib.
# ruff: noqa: PTH100, PTH114, PTH115, PTH120

from __future__ import annotations

import json
import os
import sys

from . import jail, syscalls as sc
from .wire import Request, SandboxSetup

_PER_RUN = sc.NEW_MOUNTS | sc.NEW_IPC | sc.NEW_UTS | sc.NEW_NET | sc.NEW_PIDS
_HELPER = "/helper"
"""Path of this package's folder inside bubblewrap."""
_ENTER = f"import sys; sys.path.append({_HELPER!r}); from helper.inside import main; main()"


def enter_jail(procfs: int, readable: list[str], folders: list[str]) -> None:
    """Move the helper into the programs' root file system; each program later gets its own writable directory and namespaces.

    As root, the helper needs no user namespace, since programs run as a separate user. Otherwise the helper enters a user namespace in
    which its user id maps to itself.

    Args:
        procfs: a descriptor of /proc.
        readable: the paths that programs may read.
        folders: paths at the root to link into the working directory; see `SandboxSetup.folders`.

    Raises:
        OSError: the kernel refuses a namespace or a mount.
    """
    if os.geteuid() != 0:
        _enter_user_namespace(procfs)
    sc.unshare(sc.NEW_MOUNTS)
    jail.build(readable, folders)


def enter_run(procfs: int, disk: int, user: int | None) -> None:
    """Enter new namespaces for one program, with empty writable folders. The next child becomes process 1 of the new PID namespace.

    Args:
        procfs: a descriptor of /proc.
        disk: the size limit of the folders in bytes.
        user: the user id that owns the folders; None enters a user namespace and takes this process's user id.
    """
    if user is None:
        _enter_user_namespace(procfs)
    sc.unshare(_PER_RUN)
    owner = os.getuid() if user is None else user
    jail.fill_box(disk, owner, os.getgid() if user is None else user)


def bubblewrap(
    setup: SandboxSetup, request: Request, *, user: int | None, readable: list[str]
) -> list[str]:
    """Return the command that runs `inside.main` under bubblewrap, with a root file system like that of `enter_jail`."""
    command = [setup["bwrap"], "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += [
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--as-pid-1",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]
    if user is None:
        command += ["--unshare-user"]
    else:  # needed to become the private user, then dropped
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            command += ["--cap-add", capability]
    for name, value in os.environ.items():
        command += ["--setenv", name, value]
    # Otherwise bubblewrap copies the modes of the original directories.
    for folder in _parents([*readable, *jail.DEVICES]):
        command += ["--perms", "0755", "--dir", folder]
    for path in readable:
        linked = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if linked else ["--ro-bind", path, path]
    for device in jail.DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--ro-bind", os.path.dirname(os.path.abspath(__file__)), f"{_HELPER}/helper"]
    command += ["--perms", "0755", "--size", str(request["disk"]), "--tmpfs", jail.BOX]
    for name in jail.FOLDERS:
        command += ["--perms", "0777", "--dir", f"{jail.BOX}/{name}"]
    for link, target in jail.links(readable, setup["folders"]).items():
        command += ["--symlink", target, link]
    python = [sys.executable, "-S", "-B", "-X", "utf8", "-c", _ENTER]
    told = json.dumps([setup, request, user, readable])
    return [*command, "--remount-ro", "/", "--", *python, told]


def _parents(paths: list[str]) -> list[str]:
    """Return all parent directories of the paths, outer ones first, without the root."""
    found = set()
    for path in paths:
        parts = path.split("/")[1:-1]
        found |= {"/" + "/".join(parts[: depth + 1]) for depth in range(len(parts))}
    return sorted(found)


def _enter_user_namespace(procfs: int) -> None:
    """Enter a user namespace in which this process keeps its user and group ids."""
    user, group = os.geteuid(), os.getegid()
    sc.unshare(sc.NEW_USER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=procfs)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
