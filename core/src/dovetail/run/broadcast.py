"""Trackers as one: every figure goes to all of them, and one that fails is reported and stops no run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.interfaces.tracker import Tracker


class Trackers:
    """Several trackers behind the methods of one."""

    def __init__(self, trackers: Sequence[Tracker], logger: Any) -> None:
        self._trackers = list(trackers)
        self._logger = logger

    def start(self) -> None:
        self._each("start")

    def begin(self, run: Mapping[str, Any]) -> None:
        self._each("begin", run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("log", step, metrics)

    def phase(self, step: int, name: str) -> None:
        self._each("phase", step, name)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._each("samples", step, rows)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._each("finish", summary)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any) -> None:
        for tracker in self._trackers:
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # noqa: BLE001 - an observer's fault must not stop a run
                self._logger.warning(
                    "tracker_failed", tracker=tracker.name, method=method, error=repr(error)
                )
