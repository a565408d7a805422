"""Boxes to attack: a sandbox of every isolation level of this machine, for root and for a plain user, and checks for leftovers."""

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
"""First user id of the plain users. Every variant of every test process has its own, so that leftovers can be assigned."""
SYSTEM_PYTHON = "/usr/bin/python3"
LEVELS = ("namespaces", "bubblewrap", "subprocess")
VARIANTS = (
    ("namespaces-own", "namespaces-plain", "bubblewrap-own", "subprocess-own", "subprocess-plain")
    if os.geteuid() == 0
    else tuple(f"{level}-own" for level in LEVELS)
)  # fmt: skip
"""`own`: programs run as this user, with this interpreter. `plain`: root runs them as an unprivileged user, with /usr/bin/python3."""
NOTHING: dict[str, object] = {"processes": set(), "directories": [], "mounts": []}

_made: dict[str, Sandbox | str] = {}


class Box:
    """A sandbox with methods to attack it and to check the result."""

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
        """Whether a program sees only its own processes."""
        return self.level in ("namespaces", "bubblewrap")

    def run(self, source: str, stdin: str = "", **limits: object) -> Result:
        """Run Python source."""
        program = Program(source=source, stdin=stdin.encode())
        return self.sandbox.run(program, ProgramLimits(**limits))  # type: ignore[arg-type]

    def told(self, source: str) -> dict[str, object]:
        """Run a program and return the JSON that it printed in its last line."""
        result = self.run(source)
        assert result.ok, result
        return json.loads(result.stdout.splitlines()[-1])

    def attempt(self, *attacks: str) -> dict[str, object]:
        """Evaluate each expression in the sandbox; return those that raised nothing, with the repr of their values."""
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
        """Return a new box of the same variant, whose `sandbox` the test must close."""
        fresh = Sandbox(level=self.level, python=self.python, user=self.user, tried=True)
        return Box(fresh)

    def processes(self) -> set[int]:
        """Return the sandbox's live processes without the helper: processes of its private or plain users, and forks of its helper."""
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
        """Return the temporary directories of runs."""
        users, found = self._users(), []
        for path in Path(self.sandbox._setup["base"]).glob("dovetail-sandbox-*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_uid in users:
                    found.append(path)
        return found

    def leftovers(self) -> dict[str, object]:
        """Return what runs have left behind, after waiting for supervisors to end; `NOTHING` if everything is gone."""
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
        """Return the user ids that only programs of this sandbox have."""
        if self.user is not None:
            return {self.user}
        first = (1 << 30) + (self.helper % (1 << 22)) * 256
        return set(range(first, first + 256))


def _sandbox_of(variant: str) -> Sandbox:
    """Return the sandbox of a variant, shared by all tests; skip the test if it is not available."""
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
    """One sandbox per variant for all tests, closed at the end."""
    yield
    for sandbox in _made.values():
        if isinstance(sandbox, Sandbox):
            sandbox.close()
    _made.clear()


@pytest.fixture(params=VARIANTS)
def box(request: pytest.FixtureRequest, made: None) -> Iterator[Box]:
    """A box of each variant. After the test, its runs have left nothing, and its helper is the same and works."""
    box = Box(_sandbox_of(request.param))
    helper = box.helper
    yield box
    assert box.leftovers() == NOTHING
    assert box.helper == helper
    assert box.run("print('alive')").stdout == b"alive\n"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory outside the sandbox that every user may write to, with a secret that every user may read."""
    folder = Path(f"/tmp/outside-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "secret").write_text("the expected output")
    (folder / "secret").chmod(0o666)
    yield folder
    shutil.rmtree(folder)
