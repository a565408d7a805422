"""The parent's view of the process that checks plugins: its lines as they are written, and how the process ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from dovetail.plugins.entry import PluginEntry

QUESTION, ANSWERS = "question.json", "answers.jsonl"
"""Names of the request file and the result file in the folder that the two processes share."""
_POLL = 0.1
"""Seconds between two reads of the result file."""


@attrs.frozen
class Ended:
    """The end of the checking process. `how` describes a crash or time-out, and is None if the process finished its work."""

    how: str | None


def checking(
    entries: Sequence[PluginEntry], overrides: Sequence[str], only: str | None, timeout: float
) -> Iterator[dict[str, Any] | Ended]:
    """Start a process that checks plugins one after the other.

    Args:
        entries: the plugins, of one distribution.
        overrides: `key=value` settings of the plugins' configs.
        only: a pytest `-k` expression, or None.
        timeout: seconds for each plugin, after which the process is killed.

    Yields:
        Each line of JSON as soon as the process writes it, and finally an `Ended`.
    """
    question = {
        "path": sys.path,
        "plugins": [
            {"kind": e.kind, "name": e.name, "distribution": e.distribution} for e in entries
        ],
        "overrides": list(overrides),
        "only": only,
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, QUESTION).write_text(json.dumps(question))
        answers, output = Path(folder, ANSWERS), Path(folder, "output.txt")
        answers.touch()
        with output.open("w") as file:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "dovetail_sdk.check.child", folder],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
            )
        try:
            line: dict[str, Any] | None = {}
            for line in _lines(answers, process, timeout):
                if line is not None:
                    yield line
            if line is None:
                yield Ended(f"the process was killed after {timeout:g} s")
            else:
                yield Ended(None if "done" in line else _how(process.wait(), output))
        finally:
            process.kill()
            process.wait()


def _lines(
    answers: Path, process: subprocess.Popen[Any], timeout: float
) -> Iterator[dict[str, Any] | None]:
    """Yield each complete line that the process writes to the file `answers`, until the process has ended.

    If a plugin takes longer than `timeout` seconds, yield None and stop.
    """
    rest, since, over = "", time.monotonic(), False
    with answers.open() as file:
        while not over:
            # Polled before the file is read, so that the process's last lines are read too.
            over = process.poll() is not None
            *whole, rest = (rest + file.read()).split("\n")
            for text in whole:
                line = json.loads(text)
                if "plugin" in line:
                    since = time.monotonic()
                yield line
            if time.monotonic() - since > timeout and not over:
                yield None
                return
            time.sleep(0 if over or whole else _POLL)


def _how(code: int, output: Path) -> str:
    last = output.read_text(errors="replace").strip().splitlines()[-1:]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process {how}" + (f" ({last[0]})" if last else "")
