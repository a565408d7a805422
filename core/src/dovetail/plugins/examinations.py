"""What installed packages have the doctor examine besides their plugins: functions behind entry points of one group."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dovetail.plugins.distributions import Installed
from dovetail.plugins.index import default_index

GROUP = "dovetail.doctor"
"""`name = "module:function"`; the function takes nothing and returns rows."""
ROW: dict[str, type | tuple[type, ...]] = {
    "what": str,
    "available": bool,
    "detail": str,
    "problem": (str, type(None)),
}
"""The keys of a row. `problem` says what is broken, and below it after `→` how to fix it; what is only missing is none."""
TIMEOUT = 60.0
"""Seconds that one examination may take."""

# In a process of its own: an examination that crashes or hangs must not take the doctor with it.
_ASK = """
import importlib, json, os, sys
sys.path[:] = json.loads(sys.argv[1])
function = importlib.import_module(sys.argv[2])
for attribute in sys.argv[3].split("."):
    function = getattr(function, attribute)
rows = list(function())
with os.fdopen(int(sys.argv[4]), "w") as answer:
    json.dump(rows, answer)
"""


def examine_extensions(timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """The rows of every examination, those of one package together.

    Args:
        timeout: seconds for each.

    Returns:
        Rows with the keys of `ROW`, and `owner`: the entry point's name with its distribution. An examination that
        fails is a row with a problem.
    """
    declared = default_index().extensions(GROUP)
    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        found = pool.map(lambda one: _examined(one[0], one[1], timeout), declared)
    return [row for rows in found for row in rows]


def _examined(
    entry_point: importlib.metadata.EntryPoint, distribution: Installed, timeout: float
) -> list[dict[str, Any]]:
    owner = f"{entry_point.name} of {distribution.name} {distribution.version}"
    try:
        rows = _ask(entry_point, timeout)
        for row in rows:
            _check(row)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [
            {
                "owner": owner,
                "what": entry_point.name,
                "available": False,
                "detail": "could not be examined",
                "problem": f"the examination {owner} fails: {_in_words(error)}\n"
                f"  → report it to the author of {distribution.name}",
            }
        ]
    return [{"owner": owner, **row} for row in rows]


def _ask(entry_point: importlib.metadata.EntryPoint, timeout: float) -> list[Any]:
    with tempfile.TemporaryFile("w+") as answer:
        number = answer.fileno()
        path = json.dumps(sys.path)
        subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", _ASK, path, entry_point.module, entry_point.attr, str(number)],
            pass_fds=(number,),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )
        answer.seek(0)
        rows = json.load(answer)
    if not isinstance(rows, list):
        raise ValueError(f"it returned {type(rows).__name__}, not a list of rows")  # noqa: TRY004 - what it said is wrong
    return rows


def _check(row: object) -> None:
    if not isinstance(row, dict) or row.keys() != ROW.keys():
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"a row has the keys {', '.join(ROW)}, not {keys}")
    for key, kind in ROW.items():
        if not isinstance(row[key], kind):
            raise ValueError(f"{key} of a row is {row[key]!r}")  # noqa: TRY004 - as above


def _in_words(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return str((error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1])
    return str(error)
