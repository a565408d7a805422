"""Confinement of a process before it runs a program: limits, user, capabilities, files, system calls."""
# The helper imports little to start fast, and works with descriptors: no pathlib.
# ruff: noqa: PTH109, PTH112, PTH116, PTH120, PTH123

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal

from . import landlock, seccomp, syscalls as sc
from .wire import Request, SandboxSetup

STACK = 64 << 20
_DAC_READ_SEARCH = 1 << 2
_LAST_CAPABILITY = 63
SLOTS = 256
"""The number of private user ids of one helper process."""
_SPARE = 4
"""Processes by which a program's process limit is raised, since the helper's own processes count against it, too."""


def own_processes(setup: SandboxSetup) -> bool:
    """Return whether programs run in a separate PID namespace."""
    return setup["level"] in ("namespaces", "bubblewrap")


def private_users() -> int | None:
    """Return the first of the SLOTS private user ids for programs; None if the helper is not root.

    The ids lie far above those of ordinary users. In a container that maps only a few ids, the highest ids are used.
    """
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as lines:
        top = max(int(first) + int(count) for first, _, count in map(str.split, lines))
    if top > 1 << 31:
        return (1 << 30) + (os.getpid() % (1 << 22)) * SLOTS
    if top < SLOTS * 8:
        raise OSError(
            f"programs can't run as users other than root: only {top} user ids are mapped; expected at least {SLOTS * 8}"
        )
    return top - 2 - SLOTS


def open_to_all(paths: list[str]) -> bool:
    """Return whether an unprivileged user can read all of these paths."""
    for path in paths:
        modes = [os.stat(path).st_mode & 0o5]
        parent = os.path.dirname(path)
        while parent != "/":
            modes.append(os.stat(parent).st_mode & 0o1 | 0o4)
            parent = os.path.dirname(parent)
        if any(not mode & 0o4 or (not mode & 0o1 and os.path.isdir(path)) for mode in modes):
            return False
    return True


def confine(
    setup: SandboxSetup, request: Request, *, user: int | None, readable: list[str]
) -> None:
    """Confine this process irrevocably; it can then write only in its working directory.

    Args:
        setup: the confinement that every program of the helper gets.
        request: the request to run a program, with its limits.
        user: the private user id under which the process continues; None keeps its user id.
        readable: the paths that the process may read.

    Raises:
        OSError: the kernel refused a step; the program must not run.
    """
    os.umask(0o077)
    alone = own_processes(setup)
    _set_limits(request, count_processes=alone or user is not None)
    keep = 0
    if user is not None:
        # This capability reads an interpreter in a home directory that is closed to other users. Landlock limits it to `readable`.
        by_landlock = setup["level"] == "subprocess"
        keep = _DAC_READ_SEARCH if by_landlock and not open_to_all(readable) else 0
        sc.prctl(sc.SET_KEEPCAPS, 1)
        _drop_bounding(keep)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    sc.set_capabilities(keep)
    # Set again, since both a fork and a change of user clear the death signal.
    sc.prctl(sc.SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.SET_NO_NEW_PRIVS, 1)
    if setup["level"] == "subprocess":
        devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
        landlock.restrict([*readable, *devices], [os.getcwd(), "/dev/null"])
    seccomp.install(
        only_itself=None if alone else os.getpid(),
        # Without a PID namespace, forks are refused: the CPU time of children is lost if their parent ignores SIGCHLD.
        may_fork=alone and request["processes"] > 1,
        shared_files=not alone,
    )


def _set_limits(request: Request, *, count_processes: bool) -> None:
    cpu = math.ceil(request["cpu_s"])
    limits = {
        resource.RLIMIT_CPU: (cpu + 1, cpu + 2),
        resource.RLIMIT_AS: (request["memory"],) * 2,
        resource.RLIMIT_FSIZE: (request["file_size"],) * 2,
        resource.RLIMIT_NOFILE: (request["open_files"],) * 2,
        resource.RLIMIT_STACK: (STACK, STACK),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    if count_processes:
        limits[resource.RLIMIT_NPROC] = (request["processes"] + _SPARE,) * 2
    for which, (soft, hard) in limits.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)  # noqa: PLW2901
        resource.setrlimit(which, (soft, hard))


def _drop_bounding(keep: int) -> None:
    """Drop all capabilities but `keep` from the bounding set; EINVAL marks the end of the kernel's capabilities."""
    with contextlib.suppress(OSError):
        for capability in range(_LAST_CAPABILITY + 1):
            if not keep >> capability & 1:
                sc.prctl(sc.CAPBSET_DROP, capability)
