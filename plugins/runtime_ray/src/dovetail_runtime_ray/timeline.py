"""The timeline of a run's calls, for Perfetto: Ray's own events, with the names of roles and ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

EVENT_SECONDS = 1.5
"""Seconds to wait for Ray's events; its processes report their calls once a second."""
_CALL = "task::"
"""Prefix of a call's category in Ray's events; the call's name follows."""


def write_timeline(path: Path, processes: Mapping[str, str]) -> None:
    """Write Ray's record of the run's calls as trace events in JSON.

    Args:
        path: the file; its folder is created.
        processes: display names such as `actor+ref rank 0`, by Ray's id of the process.
    """
    time.sleep(EVENT_SECONDS)
    timeline: Any = ray.timeline
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps([_named(event, processes) for event in timeline()]), encoding="utf-8"
    )


def _named(event: Mapping[str, Any], processes: Mapping[str, str]) -> dict[str, Any]:
    named = dict(event)
    category = str(event.get("cat", ""))
    if category.startswith(_CALL):
        named["name"] = category.removeprefix(_CALL)
    process = str(event.get("tid", "")).removeprefix("worker:")
    if process in processes:
        named["tid"] = processes[process]
    return named
