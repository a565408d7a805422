"""Examinations that installed packages add to `dovetail doctor`: functions that a group of entry points names."""

from __future__ import annotations

import importlib.metadata
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dovetail.plugins import ask, default_index

GROUP = "dovetail.doctor"
"""Entry-point group: `name = "module:function"`, a function without arguments that returns rows with the keys of `ROW`."""
ROW: dict[str, type | tuple[type, ...]] = {
    "what": str,
    "available": bool,
    "detail": str,
    "problem": (str, type(None)),
}
"""The keys of a row and their types. `what` names what was examined, `available` says whether it can be used here, `detail` is a remark,
such as its version. `problem` says what is broken and, on a second line after `→`, how to fix it; None if nothing is broken, even
if something is missing."""
TIMEOUT = 60.0
"""Seconds that one examination function may take."""
_CODE = """
from importlib.metadata import EntryPoint
for row in EntryPoint(*asked["entry_point"]).load()():
    answer(row)
answer("done")
"""


def examine_extensions(timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """Run the examination functions (entry points `dovetail.doctor`) of all packages and return their rows, grouped by package.

    Args:
        timeout: seconds for each examination.

    Returns:
        A row for each thing that was examined, with the keys of `ROW` (such as `what` and `problem`) and the key `owner`: the entry
        point's name with its distribution. An examination that fails becomes a row with a problem.
    """
    declared = default_index().extensions(GROUP)
    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        found = pool.map(lambda one: _examined(one[0], one[1], timeout), declared)
    return [row for rows in found for row in rows]


def _examined(
    entry_point: importlib.metadata.EntryPoint, distribution: Any, timeout: float
) -> list[dict[str, Any]]:
    owner = f"{entry_point.name} of {distribution.name} {distribution.version}"
    asked = {"entry_point": (entry_point.name, entry_point.value, entry_point.group)}
    rows, ended = ask(_CODE, asked, timeout=timeout)
    faults = [fault for row in rows[:-1] if (fault := _fault(row))]
    if rows[-1:] == ["done"] and not faults:
        return [{"owner": owner, **row} for row in rows[:-1]]
    return [
        {
            "owner": owner,
            "what": entry_point.name,
            "available": False,
            "detail": "could not be examined",
            "problem": f"the examination {owner} fails: {faults[0] if faults else ended}\n"
            f"  → report it to the author of {distribution.name}",
        }
    ]


def _fault(row: object) -> str | None:
    """Return why a value that an examination returned is not a row with the keys and types of `ROW`; None if it is one."""
    if not isinstance(row, dict) or row.keys() != ROW.keys():
        keys = sorted(row) if isinstance(row, dict) else type(row).__name__
        return f"a row has the keys {keys}; expected {', '.join(ROW)}"
    wrong = [key for key, kind in ROW.items() if not isinstance(row[key], kind)]
    return f"{wrong[0]} of a row is {row[wrong[0]]!r}" if wrong else None
