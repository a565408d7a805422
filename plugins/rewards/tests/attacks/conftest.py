"""A box to attack: a sandbox of every level that this machine has, for root and for a plain user, and what to look for after it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail_rewards.sandbox import Program, ProgramLimits, Result, Sandbox, SandboxError

PLAIN = 61_000 + 8 * (os.getpid() % 400)
"""First of the user ids of plain users: one a variant of each test process, so that leftovers tell whose they are."""
SYSTEM_PYTHON = "/usr/bin/python3"
LEVELS = ("namespaces", "bubblewrap", "subprocess")
VARIANTS = (
    ("namespaces-own", "namespaces-plain", "bubblewrap-own", "subprocess-own", "subprocess-plain")
    if os.geteuid() == 0
    else tuple(f"{level}-own" for level in LEVELS)
)  # fmt: skip
"""own: by this user with this interpreter; plain: by root for a user without rights, with the system's interpreter."""
NOTHING: dict[str, object] = {"processes": set(), "directories": [], "mounts": []}

_made: dict[str, Sandbox | str] = {}


class Box:
    """A sandbox as its attackers and their judges see it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.level = sandbox.level
        self.user = sandbox._user
        self.python = sandbox._python

    @property
    def helper(self) -> int:
        """Process id of the sandbox's helper."""
        assert self.sandbox._helper is not None
        return self.sandbox._helper.pid

    @property
    def own_processes(self) -> bool:
        """Whether a program sees its own processes alone."""
        return self.level in ("namespaces", "bubblewrap")

    def run(self, source: str, stdin: str = "", **limits: object) -> Result:
        """Run Python source."""
        program = Program(source=source, stdin=stdin.encode())
        return self.sandbox.run(program, ProgramLimits(**limits))  # type: ignore[arg-type]

    def told(self, source: str) -> dict[str, object]:
        """What a program printed as JSON in its last line."""
        result = self.run(source)
        assert result.ok, result
        return json.loads(result.stdout.splitlines()[-1])

    def attempt(self, *attacks: str) -> dict[str, object]:
        """Try each piece of Python inside: those that raised nothing, and what came of them."""
        return self.told(f"""
import ctypes, json, os, signal, sys, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    result = libc.syscall(*[ctypes.c_long(n) for n in numbers])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
succeeded = {{}}
for attack in {attacks!r}:
    try:
        succeeded[attack] = repr(eval(attack))
    except Exception as error:
        pass
sys.stdout.write(json.dumps(succeeded))
""")

    def another(self) -> Box:
        """A sandbox of the same variant, of the test's own; its `sandbox` is to be closed."""
        fresh = Sandbox(level=self.level, python=self.python, user=self.user, tried=True)
        return Box(fresh)

    def processes(self) -> set[int]:
        """Live processes of the sandbox but its helper: of its private users, of its plain user, or forks of its helper."""
        helper, users = self.helper, self._users()
        found = set()
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != helper:
                try:
                    status = (path / "status").read_text()
                    command = (path / "cmdline").read_bytes()
                except OSError:
                    continue
                if "\nState:\tZ" in status:
                    continue
                user = int(re.search(r"Uid:\t(\d+)", status).group(1))  # type: ignore[union-attr]
                forked = b"helper.server" in command and f"PPid:\t{helper}\n" in status
                if user in users or forked:
                    found.add(int(path.name))
        return found

    def directories(self) -> list[Path]:
        """Directories of runs outside of memory."""
        users, found = self._users(), []
        for path in Path(self.sandbox._setup["base"]).glob("dovetail-sandbox-*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_uid in users:
                    found.append(path)
        return found

    def leftovers(self) -> dict[str, object]:
        """What a run left behind, after a moment for supervisors to leave; `NOTHING` where nothing did."""
        for _ in range(3000):
            mounts = Path("/proc/self/mountinfo").read_text().splitlines()
            found: dict[str, object] = {
                "processes": self.processes(),
                "directories": self.directories(),
                "mounts": [line for line in mounts if " /box " in line or "/dovetail-" in line],
            }
            if found == NOTHING:
                break
            time.sleep(0.02)
        return found

    def _users(self) -> set[int]:
        """User ids that programs of this sandbox have, and nobody else."""
        if self.user is not None:
            return {self.user}
        first = (1 << 30) + (self.helper % (1 << 22)) * 256
        return set(range(first, first + 256))


def _sandbox_of(variant: str) -> Sandbox:
    """The sandbox of a variant, shared by all tests; skips with the reason where it is not to be had."""
    if variant not in _made:
        _made[variant] = _make(variant)
    found = _made[variant]
    if isinstance(found, str):
        pytest.skip(f"{variant}: {found}")
    return found


def _make(variant: str) -> Sandbox | str:
    level, who = variant.split("-")
    user, python = None, None
    if who == "plain":
        if not Path(SYSTEM_PYTHON).exists():
            return f"there is no {SYSTEM_PYTHON}"
        python = SYSTEM_PYTHON
    if who == "plain":
        user = PLAIN + VARIANTS.index(variant)
    try:
        sandbox = Sandbox(level=level, python=python, user=user, tried=True)
        sandbox.run(Program(source=""), ProgramLimits())
    except SandboxError as error:
        return error.message
    return sandbox


@pytest.fixture(scope="session")
def made() -> Iterator[None]:
    """One sandbox a variant for all tests; closed at the end."""
    yield
    for sandbox in _made.values():
        if isinstance(sandbox, Sandbox):
            sandbox.close()
    _made.clear()


@pytest.fixture(params=VARIANTS)
def box(request: pytest.FixtureRequest, made: None) -> Iterator[Box]:
    """A box of each variant; after the test nothing of its runs is left, and its helper is the same and well."""
    box = Box(_sandbox_of(request.param))
    helper = box.helper
    yield box
    assert box.leftovers() == NOTHING
    assert box.helper == helper
    assert box.run("print('alive')").stdout == b"alive\n"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory outside that any user may reach and write to, with a secret that any user may read."""
    folder = Path(f"/tmp/outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "secret").write_text("the expected output")
    (folder / "secret").chmod(0o666)
    yield folder
    shutil.rmtree(folder)
