"""Stand-in for verl's tracing, without effect, since Dovetail's trackers do the tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def rollout_trace_op(function: Function) -> Function:
    """Return the function unchanged; Dovetail's trackers do the tracing."""
    return function
