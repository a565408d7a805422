"""Rules about stages that the config selects: names and columns that come to nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from dovetail.errors import nearest
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.plugins.index import default_index
from dovetail.sections import RunConfig

_MISSPELT = 0.8
"""Similarity from which on a name is a misspelt one, and not that of a stage which is not installed."""


class StageOrderUnknown(PreflightRule):
    """A stage names another in `before` or `after`, of which there is none, but one of a similar name."""

    name = "stage_order_unknown"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None:
            return
        known = {stage.name for stage in plan.stages}
        known |= {entry.name for entry in default_index().entries("stage")}
        for path, plugin in plan.facts.plugins.items():
            if plugin.ref.kind != "stage":
                continue
            for attribute in ("before", "after"):
                for other in getattr(plugin.cls, attribute):
                    if other not in known and (near := nearest(other, known, cutoff=_MISSPELT)):
                        yield self.warning(
                            f"{path}: {plugin.cls.name} names {other!r} in `{attribute}`, and there is no such stage",
                            hint=f"did its author mean {near!r}?",
                        )


class RewriteUnread(PreflightRule):
    """A stage rewrites scores alone where the estimator reads token rewards, or the other way round, so that it changes nothing."""

    name = "rewrite_unread"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None:
            return
        estimator = plan.facts.plugins["algorithm.advantage"]
        # A property depends on the config, which an instance has.
        level = inspect.getattr_static(estimator.cls, "level", None)
        written = {"token": "scores", "sample": "token_rewards"}.get(str(level))
        read = "token_rewards" if written == "scores" else "scores"
        for stage in plan.stages:
            if written in stage.rewrites and read not in stage.rewrites:
                yield self.warning(
                    f"the stage {stage.name} rewrites {written!r} and not {read!r}, which {estimator.title} reads",
                    hint=f"rewrite {read!r} as well, and name it in `rewrites`",
                )
