"""PreflightRule: finds silent misconfiguration before step 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from dovetail.interfaces.plugin import Plugin

PREFLIGHT_API = "1.0"


@attrs.frozen(kw_only=True)
class Finding:
    """What a rule found."""

    rule: str
    severity: Literal["error", "warning"]
    message: str
    hint: str | None = None


class PreflightRule(Plugin):
    """One rule over a whole config and its plan."""

    @abstractmethod
    def check(self, config: Any, plan: Any) -> Iterator[Finding]:
        """Yield what is wrong; nothing where all is well."""
