"""PreflightRule: finds silent misconfiguration before step 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from dovetail.interfaces.plugin import Plugin


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that is wrong with a config."""

    rule: str
    """Id of the rule that found it: its plugin's name."""
    severity: Literal["error", "warning"]
    """`error` where training can't come right, and nothing is started; `warning` where it probably will not."""
    message: str
    """What is wrong: the keys with their values, and what follows from them."""
    hint: str | None = None
    """How to fix it."""
    instead_of: str | None = None
    """Words of the planner's refusal that this finding explains better: one that holds them is not listed besides."""

    def __str__(self) -> str:
        text = f"{self.message} [{self.rule}]"
        return f"{text}\n  → {self.hint}" if self.hint else text


class PreflightRule(Plugin):
    """One rule over a whole config and its plan. Its name is the id by which `preflight.ignore` silences it."""

    @abstractmethod
    def check(self, config: Any, plan: Any) -> Iterator[Finding]:
        """Yield what is wrong; nothing where all is well.

        Args:
            config: the whole config, a `RunConfig`.
            plan: what was planned from it (stages, models, counts, the chosen plugins), or None where that failed.
                Its counts of steps are None where the data has not been read.
        """

    def error(
        self, message: str, *, hint: str | None = None, instead_of: str | None = None
    ) -> Finding:
        """A finding of this rule with which nothing is started."""
        return Finding(
            rule=self.name, severity="error", message=message, hint=hint, instead_of=instead_of
        )

    def warning(self, message: str, *, hint: str | None = None) -> Finding:
        """A finding of this rule that is shown, and no more."""
        return Finding(rule=self.name, severity="warning", message=message, hint=hint)
