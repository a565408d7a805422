"""A preflight rule: the overlong penalty is both in the manager and in the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding, PreflightRule
from dovetail_rewards.manager_config import DapoConfig


class OverlongTwice(PreflightRule):
    """Overlong responses are punished twice: by the manager `dapo` and by `algorithm.overlong_penalty`."""

    name = "overlong_twice"
    api = ">=1.0,<2"

    def check(self, config: Any, plan: Any) -> Iterator[Finding]:
        manager, penalty = config.reward.manager, config.algorithm.overlong_penalty
        if isinstance(manager, DapoConfig) and manager.factor and penalty and penalty.factor:
            yield self.warning(
                f"reward.manager.name = dapo with factor = {manager.factor:g} and "
                f"algorithm.overlong_penalty.factor = {penalty.factor:g}: overlong responses are punished twice",
                hint="set reward.manager.name=naive or algorithm.overlong_penalty=null",
            )
