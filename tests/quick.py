"""Runs the tests nearest to what changed since a commit. Usage: python tests/quick.py COMMIT

A changed test file runs itself. A changed module runs the tests in the folder of its name (`core/src/dovetail/batch`:
`core/tests/batch`) or, where its package has no such folder, all of the package's, and any of the package's that name the
module. Tests that name more of the module's path come first; those left after 25 seconds are skipped, and counted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 25
MARKS = "not nightly and not ray and not vllm and not sglang and not gpu"


def lines(*command: str) -> list[str]:
    """Return what a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")


def tests_beside(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the tests that a changed file selects, each after the number of parts of its path that the test names."""
    if path.name.startswith("test_") and path.exists():
        yield len(path.parts), str(path)
    elif "src" in path.parts and path.suffix == ".py":
        package, module = str(path.with_suffix("")).split("/src/")
        names = module.removesuffix("/__init__").split("/")
        tests = Path(package, "tests")
        folder = next((f for f in map(tests.joinpath, names[1:2]) if f.is_dir()), tests)
        prefixes = [".".join(names[:length]) for length in range(len(names), 0, -1)]
        for test in tests.rglob("test_*.py"):
            text = test.read_text()
            named = next((prefix.count(".") + 1 for prefix in prefixes if prefix in text), 0)
            if named == len(names) or folder in test.parents:
                yield named, str(test)


class Budget:
    """Skips the tests that are left when the time is over."""

    def pytest_collection_finish(self) -> None:
        self.end = time.monotonic() + SECONDS

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(f"not run: {SECONDS} seconds are over")


changed = lines("git", "diff", "--name-only", sys.argv[1], "--")
changed += lines("git", "ls-files", "--others", "--exclude-standard")
packages = sorted({name.split("/src/")[0] for name in changed if "/src/" in name})
manifests = [sys.executable, "-m", "dovetail_sdk", "manifest", "--check", *packages]
if packages and subprocess.run(manifests, check=False).returncode:
    sys.exit(1)
nearest = sorted({test for name in changed for test in tests_beside(Path(name))}, reverse=True)
if nearest:
    status = pytest.main(["-x", "-m", MARKS, *(test for _, test in nearest)], plugins=[Budget()])
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
