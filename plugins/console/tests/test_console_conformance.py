"""The tracker `console` passes the suite of its kind."""

from __future__ import annotations

from dovetail_console.tracker import ConsoleTracker
from dovetail_sdk.testing.conformance import TrackerConformance

TestConsole = TrackerConformance.of(ConsoleTracker)
