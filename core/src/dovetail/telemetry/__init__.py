"""Telemetry: metrics that merge, timers, the run directory, logging, trackers and the report. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.telemetry.console import ConsoleTracker
    from dovetail.telemetry.jsonl import JsonlTracker
    from dovetail.telemetry.logging import close_logging, get_logger, set_step, setup_logging
    from dovetail.telemetry.metrics import Last, Max, Mean, Metric, Min, Sum, merge_metrics, values
    from dovetail.telemetry.report import write_report
    from dovetail.telemetry.run_directory import RunDirectory
    from dovetail.telemetry.summary import History, summarise
    from dovetail.telemetry.timers import Timers

_HOME = {
    "console": ("ConsoleTracker",),
    "jsonl": ("JsonlTracker",),
    "logging": ("close_logging", "get_logger", "set_step", "setup_logging"),
    "metrics": ("Last", "Max", "Mean", "Metric", "Min", "Sum", "merge_metrics", "values"),
    "report": ("write_report",),
    "run_directory": ("RunDirectory",),
    "summary": ("History", "summarise"),
    "timers": ("Timers",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ConsoleTracker",
    "History",
    "JsonlTracker",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "RunDirectory",
    "Sum",
    "Timers",
    "close_logging",
    "get_logger",
    "merge_metrics",
    "set_step",
    "setup_logging",
    "summarise",
    "values",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
