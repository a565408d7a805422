"""The rows of `dovetail doctor` for this package: the isolation levels at which untrusted code can run on this machine."""

from __future__ import annotations

from typing import Any


def examine() -> list[dict[str, Any]]:
    """Try each isolation level of the sandbox with a program, and return one table row for each level, best first.

    Returns:
        rows with `what` and `detail` as text, `available`, and `problem`. `problem` is None, except in the
        last row if no level works; there it says what to do.
    """
    from dovetail_rewards.sandbox.levels import available_levels

    rows: list[dict[str, Any]] = [
        {
            "what": f"sandbox level {report.level}",
            "available": report.available,
            "detail": report.detail,
            "problem": None,
        }
        for report in available_levels()
    ]
    if not any(row["available"] for row in rows):
        rows[-1]["problem"] = (
            "this machine can't run untrusted code at any isolation level\n"
            "  → use Linux with user namespaces or Landlock, or set `service` to the address of a sandbox service"
        )
    return rows
