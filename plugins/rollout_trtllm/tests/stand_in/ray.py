"""Not Ray: the stand-in engine keeps its workers in its own process."""

from __future__ import annotations

from typing import Any

STARTED: list[dict[str, Any]] = []


def init(**settings: Any) -> None:
    """Note what a cluster was asked for."""
    STARTED.append(settings)


def nodes() -> list[dict[str, Any]]:
    """Where its one node listens."""
    return [{"NodeManagerAddress": "127.0.0.1"}]
