"""What a process gives up before it runs a program: limits, user, capabilities, files, system calls."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal

from . import landlock, seccomp
from . import syscalls as sc
from .wire import Request, Setup

STACK = 64 << 20
_DAC_READ_SEARCH = 1 << 2
_LAST_CAPABILITY = 63
_SPARE = 4
"""Processes of the helper's own that count against the private user or namespace."""


def own_processes(setup: Setup) -> bool:
    """Whether programs live in a process namespace of their own."""
    return setup["level"] in ("namespaces", "bubblewrap")


def private_user(slot: int) -> int | None:
    """The user id that a run of this slot gets where the helper is root; None elsewhere.

    Far above people's ids where the system maps them all; the highest mapped ones in a container with few.
    """
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as lines:  # noqa: PTH123
        extents = [tuple(map(int, line.split())) for line in lines]
    top = max(start + count for start, _, count in extents)
    if top > (1 << 31):
        return (1 << 30) + ((os.getpid() & 0x3FFFFF) << 8) + slot % 256
    return top - 2 - slot % 256 if top > 1024 else None  # noqa: PLR2004 - people's and services' ids


def confine(setup: Setup, request: Request, *, user: int | None, readable: list[str]) -> None:
    """Confine this process for good. The working directory is the only one that it may write to.

    Raises:
        OSError: the kernel refuses a step; the program must not be run.
    """
    os.umask(0o077)
    alone = own_processes(setup) or user is not None
    _set_limits(request, count_processes=alone)
    keep = 0
    if user is not None:
        # Landlock narrows what this capability reads: an interpreter in a home directory closed to other users
        keep = _DAC_READ_SEARCH if setup["level"] == "subprocess" else 0
        sc.prctl(sc.SET_KEEPCAPS, 1)
        _drop_bounding(keep)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    sc.set_capabilities(keep)
    sc.prctl(sc.SET_PDEATHSIG, signal.SIGKILL)
    sc.prctl(sc.SET_NO_NEW_PRIVS, 1)
    if setup["level"] == "subprocess":
        devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
        landlock.restrict([*readable, *devices], [os.getcwd(), "/dev/null"])  # noqa: PTH109
    seccomp.install(
        only_itself=None if alone else os.getpid(), may_fork=alone and request["processes"] > 1
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
    """Take every other capability out of what programs could ever gain; the kernel ends its list with EINVAL."""
    with contextlib.suppress(OSError):
        for capability in range(_LAST_CAPABILITY + 1):
            if not keep >> capability & 1:
                sc.prctl(sc.CAPBSET_DROP, capability)
