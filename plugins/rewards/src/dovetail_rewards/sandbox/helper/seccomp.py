"""A seccomp filter: system calls that sandboxed programs don't need fail with EPERM.

The filter blocks every socket, and rarely used parts of the kernel: namespaces, tracing, keys, io_uring, and kernel objects that
outlive a process. All other calls are allowed, since limits, users, namespaces and Landlock confine the rest.
"""

from __future__ import annotations

import ctypes
import platform
import signal
from collections.abc import Iterable

from .syscalls import ANY_NEW, SET_NO_NEW_PRIVS, SET_PDEATHSIG, prctl, syscall

# name: (number on x86_64, number on aarch64); None if the machine lacks the call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
}
"""System calls that are always refused: their numbers on x86-64 and arm64, None where the call does not exist. Since `socket` is refused,
programs have no network at any isolation level."""

ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
}
"""System calls that are also refused if programs share the machine's files, because Landlock does not guard file attributes."""

JUDGED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
    "rt_sigaction": (13, 134),
    "socketpair": (53, 199),
}
"""System calls that are refused depending on their arguments: their numbers on x86-64 and arm64, None where the call does not exist."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_THREAD = 0x00010000
_DATAGRAM = 2  # the bit of SOCK_DGRAM that SOCK_STREAM and SOCK_SEQPACKET lack
_X32 = 0x40000000
_FCNTL_OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to any process of the user
_IOCTL_OWNERS = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP; TIOCSTI types into a terminal

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def supported() -> str | None:
    """Return the reason why the system call filter does not support this machine, or None."""
    machine = platform.machine()
    return (
        None
        if machine in _ARCHITECTURES
        else f"machine type {machine} is not supported; expected {' or '.join(_ARCHITECTURES)}"
    )


def build(*, only_itself: int | None, may_fork: bool, shared_files: bool) -> list[_Instruction]:
    """Return the seccomp filter as BPF instructions.

    Args:
        only_itself: the only process id that may be signalled; None if namespaces or user ids restrict signals.
        may_fork: whether new processes are allowed; threads always are.
        shared_files: whether programs can open the machine's files by path.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if architecture == _ARCHITECTURES["x86_64"][1]:
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _EPERM)]
    denied = {**DENIED, **ATTRIBUTES} if shared_files else DENIED
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    for name, body in _judgements(only_itself, may_fork):
        if (number := JUDGED[name][column]) is not None:
            program += [(_EQUAL, 0, len(body), number), *body]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def install(*, only_itself: int | None, may_fork: bool, shared_files: bool) -> None:
    """Install the seccomp filter for this process and its children, irrevocably."""
    program = build(only_itself=only_itself, may_fork=may_fork, shared_files=shared_files)
    filters = (_Filter * len(program))(*(_Filter(*step) for step in program))
    prctl(SET_NO_NEW_PRIVS, 1)
    number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    syscall("seccomp filter", number, 1, 0, ctypes.byref(_Program(len(program), filters)))


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("true", ctypes.c_uint8),
        ("false", ctypes.c_uint8),
        ("constant", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter))]


def _judgements(
    only_itself: int | None, may_fork: bool
) -> Iterable[tuple[str, list[_Instruction]]]:
    """Yield the system calls of `JUDGED` that need instructions of their own under these settings.

    Each is yielded as its name and the BPF instructions that decide on a call, by its arguments where necessary, and end with a return.
    """
    # A filter can't read the flags of clone3, which are behind a pointer. With ENOSYS, libraries fall back to clone.
    yield "clone3", [(_RETURN, 0, 0, _ENOSYS)]
    new = [(_BITS, 0, 1, ANY_NEW), (_RETURN, 0, 0, _EPERM)]
    threads = [(_BITS, 1, 0, _THREAD), (_RETURN, 0, 0, _EPERM)]
    yield "clone", [_argument(0), *new, *([] if may_fork else threads), (_RETURN, 0, 0, _ALLOW)]
    if may_fork:
        # If a parent ignores SIGCHLD, the kernel does not count its children's CPU time. A filter can't read the new action,
        # which is behind a pointer, so for SIGCHLD only a null pointer is allowed: a query of the current action.
        yield (
            "rt_sigaction",
            [
                _argument(0),
                (_EQUAL, 0, 5, signal.SIGCHLD),
                _argument(1),
                (_EQUAL, 0, 2, 0),
                _argument(1, high=True),
                (_EQUAL, 1, 0, 0),
                (_RETURN, 0, 0, _EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ],
        )
    else:
        yield "fork", [(_RETURN, 0, 0, _EPERM)]
        yield "vfork", [(_RETURN, 0, 0, _EPERM)]
    yield "fcntl", [_argument(1), *_none_of(_FCNTL_OWNERS)]
    yield "ioctl", [_argument(1), *_none_of(_IOCTL_OWNERS)]
    yield "prlimit64", [_argument(0), *_one_of((0,))]
    yield "prctl", [_argument(0), *_none_of((SET_PDEATHSIG,))]
    # A datagram socket of a pair could send to any socket with a path, so datagram pairs are refused.
    datagram = [(_BITS, 0, 1, _DATAGRAM), (_RETURN, 0, 0, _EPERM)]
    yield "socketpair", [_argument(1), *datagram, (_RETURN, 0, 0, _ALLOW)]
    if only_itself is not None:
        yield "kill", [_argument(0), *_one_of((only_itself, 0))]
        yield "tgkill", [_argument(0), *_one_of((only_itself,))]
        yield "tkill", [(_RETURN, 0, 0, _EPERM)]


def _argument(index: int, *, high: bool = False) -> _Instruction:
    """Return the instruction that loads the lower or upper 32 bits of an argument."""
    return (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * index + 4 * high)


def _none_of(values: tuple[int, ...]) -> list[_Instruction]:
    refusals = [step for v in values for step in ((_EQUAL, 0, 1, v), (_RETURN, 0, 0, _EPERM))]
    return [*refusals, (_RETURN, 0, 0, _ALLOW)]


def _one_of(values: tuple[int, ...]) -> list[_Instruction]:
    grants = [step for v in values for step in ((_EQUAL, 0, 1, v), (_RETURN, 0, 0, _ALLOW))]
    return [*grants, (_RETURN, 0, 0, _EPERM)]
