"""A pytest plugin that records every test when it ends, so that no result is lost if the process dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

_LONGEST = 2000
"""Maximum characters of a failure's text; the end is kept, since it has the assertion."""


class ResultRecorder:
    """Pytest plugin that writes `{"start": …}` before a test and `{"test": {…}}` after the test."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._began = 0.0
        self._result: dict[str, Any] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write the error if pytest can't collect a test file, class or function."""
        if report.failed:
            self._write(broken=str(report.longrepr)[-_LONGEST:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test starts."""
        self._began = time.perf_counter()
        self._result = {"outcome": "passed", "reason": None}
        self._write(start=_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst result of a test's phases (setup, call, teardown) as the test's outcome."""
        reason = getattr(report, "wasxfail", None)
        if report.failed:
            self._result = {"outcome": "failed", "reason": str(report.longrepr)[-_LONGEST:]}
        elif report.skipped and self._result["outcome"] == "passed":
            outcome = "skipped" if reason is None else "expected"
            self._result = {"outcome": outcome, "reason": reason or _skip_reason(report)}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the outcome of a test."""
        seconds = round(time.perf_counter() - self._began, 3)
        self._write(test={"name": _name(nodeid), **self._result, "seconds": seconds})


def _name(nodeid: str) -> str:
    """Return a test's name without the file, such as `TestMine::test_this[1.0]`."""
    return nodeid.partition("::")[2]


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
