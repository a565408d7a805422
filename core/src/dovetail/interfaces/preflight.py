"""Preflight rules: functions that find silent misconfiguration before step 1; and Finding, which they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs


@attrs.frozen(kw_only=True)
class Finding:
    """A problem of a config. A preflight rule, which checks configs, creates findings with `Finding.error` and `Finding.warning`."""

    rule: str = ""
    """Name of the check that found the problem. The name of a preflight rule is that of its function, filled in automatically."""
    severity: Literal["error", "warning"]
    """`error`: training can't succeed, so nothing is started. `warning`: training will probably not succeed."""
    message: str
    """Description of the problem: the keys with their values, and the consequence."""
    hint: str | None = None
    """The fix of the problem."""
    instead_of: str | None = None
    """Text of a planner's error, or a part of it. Errors that contain this text are not listed, since the finding explains them better."""

    @classmethod
    def error(
        cls, message: str, *, hint: str | None = None, instead_of: str | None = None
    ) -> Finding:
        """Return a finding that prevents the run's start."""
        return cls(severity="error", message=message, hint=hint, instead_of=instead_of)

    @classmethod
    def warning(cls, message: str, *, hint: str | None = None) -> Finding:
        """Return a finding that is shown and lets the run start."""
        return cls(severity="warning", message=message, hint=hint)

    def __str__(self) -> str:
        text = f"{self.message} [{self.rule}]"
        return f"{text}\n  → {self.hint}" if self.hint else text


PreflightRule = Callable[[Any, Any], Iterator[Finding]]
"""A function from `(config, plan)` to findings. The config is a whole `RunConfig`. The plan is None if planning failed; its counts of
steps are None if the data has not been read."""
