"""The levels of isolation that this machine offers, found by running a program at each."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

import attrs

from dovetail_rewards.sandbox.errors import SandboxError
from dovetail_rewards.sandbox.helper.wire import Level, SandboxSetup

LEVELS: tuple[Level, ...] = ("namespaces", "bubblewrap", "subprocess")
"""The isolation levels, best first. `namespaces` and `bubblewrap` give the same guarantees; `namespaces` is faster. `subprocess` must be
selected by name.
"""

GUARANTEES: dict[Level, str] = {
    "namespaces": "sees only the interpreter and the system's libraries; own processes, network and files",
    "bubblewrap": "sees only the interpreter and the system's libraries; own processes, network and files",
    "subprocess": "reads only the interpreter and the system's libraries, by Landlock; no network; shares process ids",
}
"""The guarantees of each level, as one line of text."""


_IN_MEMORY = "/dev/shm"  # noqa: S108 - every directory in it has a name of its own and mode 0700
_ROOM = 1 << 30


@attrs.frozen(kw_only=True)
class LevelReport:
    """The state of one isolation level on this machine, as printed by `dovetail doctor`."""

    level: Level
    """The level's name."""
    available: bool
    """Whether a test program ran at this level."""
    detail: str
    """The level's guarantees, or the reason why it is not available."""


def setup_for(
    level: Level,
    *,
    packages: Sequence[str] = (),
    preload: Sequence[str] = (),
    folders: Sequence[str] = (),
) -> SandboxSetup:
    """Return the set-up of a helper process at this level; the other arguments are those of `Sandbox`.

    Raises:
        SandboxError: the level needs a program that is not installed.
    """
    if sys.platform != "linux":
        raise SandboxError(
            f"untrusted code can't be run on {sys.platform}; the sandbox needs Linux"
        )
    bwrap = shutil.which("bwrap") or ""
    if level == "bubblewrap" and not bwrap:
        raise SandboxError(
            "level 'bubblewrap' needs bwrap, which is not installed: apt-get install bubblewrap"
        )
    if level == "subprocess" and folders:
        raise SandboxError(
            f"level 'subprocess' can't provide the top-level folders {', '.join(folders)}; use 'namespaces' or 'bubblewrap'"
        )
    return SandboxSetup(
        level=level,
        readable=list(packages),
        packages=list(packages),
        preload=list(preload),
        folders=list(folders),
        bwrap=bwrap,
        base=_base(),
    )


def _base() -> str:
    """Return the parent of temporary directories: in memory if there is room, since some disks delete files slowly."""
    with contextlib.suppress(OSError):
        found = os.statvfs(_IN_MEMORY)
        if found.f_bavail * found.f_frsize >= _ROOM and os.access(_IN_MEMORY, os.W_OK):
            return _IN_MEMORY
    return tempfile.gettempdir()


def available_levels(python: str | None = None) -> list[LevelReport]:
    """Try every isolation level, best first, and return a report on each.

    Each level is tried by running a program; the result is cached in this process.

    Args:
        python: the interpreter of the programs; None means this interpreter.
    """
    return list(_available_levels(python))


def chosen_level(level: str, python: str | None = None) -> Level:
    """Return the configured isolation level; for "auto", `namespaces` or else `bubblewrap`, never a weaker level.

    Raises:
        SandboxError: the level is not available; the message gives the reasons and the alternatives.
    """
    wanted = LEVELS[:2] if level == "auto" else [known for known in LEVELS if known == level]
    reports = {report.level: report for report in _available_levels(python)}
    for known in wanted:
        if reports[known].available:
            return known
    reasons = "; ".join(f"{known}: {reports[known].detail}" for known in wanted)
    others = [f"set level={known}" for known in LEVELS if reports[known].available]
    weaker = " (weaker: it shares process ids and the file system)"
    choices = [f"{other}{weaker if 'subprocess' in other else ''}" for other in others]
    hint = ", or ".join([*choices, "set `service` to the address of a sandbox service"])
    raise SandboxError(
        f"this machine can't run untrusted code at level {' or '.join(wanted)}: {reasons}",
        hint=hint,
    )


@functools.cache
def _available_levels(python: str | None) -> tuple[LevelReport, ...]:
    return tuple(_tried(level, python) for level in LEVELS)


def _tried(level: Level, python: str | None) -> LevelReport:
    from dovetail_rewards.sandbox.local import Sandbox
    from dovetail_rewards.sandbox.values import Program, ProgramLimits

    try:
        with Sandbox(level=level, python=python, tried=True) as sandbox:
            result = sandbox.run(
                Program(source="import sys; sys.stdout.write('1')"), ProgramLimits()
            )
    except SandboxError as error:
        return LevelReport(level=level, available=False, detail=error.message)
    if result.stdout != b"1":
        problem = result.stderr.decode("utf-8", "replace").strip() or f"verdict {result.verdict}"
        return LevelReport(level=level, available=False, detail=f"a test program failed: {problem}")
    return LevelReport(level=level, available=True, detail=GUARANTEES[level])
