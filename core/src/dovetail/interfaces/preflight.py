"""Preflight rules: functions that find silent misconfiguration before step 1, and what they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs


@attrs.frozen(kw_only=True)
class Finding:
    """One problem of a config; a rule makes it with `Finding.error` or `Finding.warning`."""

    rule: str = ""
    """Id of the check that found it; for a rule, its function's name, which is filled in."""
    severity: Literal["error", "warning"]
    """`error` where training can't succeed, so that nothing is started; `warning` where it probably will not succeed."""
    message: str
    """Description of the problem: the keys with their values, and the consequence."""
    hint: str | None = None
    """How to fix it."""
    instead_of: str | None = None
    """Part of a planner error's text: an error that contains it is not listed, since this finding explains it better."""

    @classmethod
    def error(
        cls, message: str, *, hint: str | None = None, instead_of: str | None = None
    ) -> Finding:
        """Return a finding that prevents the run's start."""
        return cls(severity="error", message=message, hint=hint, instead_of=instead_of)

    @classmethod
    def warning(cls, message: str, *, hint: str | None = None) -> Finding:
        """Return a finding that is only shown."""
        return cls(severity="warning", message=message, hint=hint)

    def __str__(self) -> str:
        text = f"{self.message} [{self.rule}]"
        return f"{text}\n  → {self.hint}" if self.hint else text


PreflightRule = Callable[[Any, Any], Iterator[Finding]]
"""A function from `(config, plan)` to findings. The config is a whole `RunConfig`. The plan is made from it, or None where that failed;
its counts of steps are None where the data has not been read."""
