"""The process that checks plugins, seen from outside: its lines as they come, and how it ended where it did not end well."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

import attrs

from dovetail.plugins.entry import PluginEntry

_LOOK_EVERY = 0.2
"""Seconds between two looks at whether the process still lives: a grandchild may hold its pipe open."""
_CHUNK = 1 << 16


@attrs.frozen
class Ended:
    """The process is over: `how` in words, None where it said that it is done."""

    how: str | None


def checking(
    entries: Sequence[PluginEntry], overrides: Sequence[str], only: str | None, timeout: float
) -> Iterator[dict[str, Any] | Ended]:
    """Start a process that checks these plugins one after the other.

    Args:
        entries: the plugins, of one distribution.
        overrides: `key=value` settings of their configs.
        only: a pytest `-k` expression, or None.
        timeout: seconds for each plugin, after which the process is ended.

    Yields:
        Each line that it writes, at once, and last how it ended.
    """
    asked = {
        "path": sys.path,
        "plugins": [
            {"kind": e.kind, "name": e.name, "distribution": e.distribution} for e in entries
        ],
        "overrides": list(overrides),
        "only": only,
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ours, theirs = os.pipe()
    with (
        os.fdopen(ours, "rb", buffering=0) as answers,
        tempfile.TemporaryFile("w+") as noise,
        tempfile.TemporaryFile("w+") as question,
    ):
        json.dump(asked, question)
        question.seek(0)
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "dovetail_sdk.check.child", str(theirs)],
            stdin=question,
            stdout=noise,
            stderr=noise,
            pass_fds=(theirs,),
            env=environment,
        )
        os.close(theirs)
        try:
            done, in_time = False, True
            for line in _lines(answers, process, timeout):
                if line is None:
                    in_time = False
                    break
                done = bool(line.get("done"))
                yield line
            yield Ended(
                None if done else _how(process, timeout if in_time is False else None, noise)
            )
        finally:
            process.kill()
            process.wait()


def _lines(
    answers: IO[bytes], process: subprocess.Popen[Any], timeout: float
) -> Iterator[dict[str, Any] | None]:
    """Whole lines as they come; None where a plugin took too long."""
    rest, since = b"", time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(answers, selectors.EVENT_READ)
        while True:
            over = process.poll() is not None
            if not selector.select(0 if over else _LOOK_EVERY):
                if over:
                    return
                if time.monotonic() - since > timeout:
                    yield None
                    return
                continue
            read = answers.read(_CHUNK)
            if not read:
                process.wait()
                return
            *whole, rest = (rest + read).split(b"\n")
            for text in whole:
                line = json.loads(text)
                if "plugin" in line:
                    since = time.monotonic()
                yield line


def _how(process: subprocess.Popen[Any], timeout: float | None, noise: IO[str]) -> str:
    if timeout is not None:
        return f"the process was ended after {timeout:g} s"
    code = process.wait()
    noise.seek(0)
    last = noise.read().strip().splitlines()[-1:]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process {how}" + (f" ({last[0]})" if last else "")
