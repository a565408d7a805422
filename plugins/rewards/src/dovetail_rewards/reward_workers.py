"""A preflight rule: scoring is to run in the runtime's processes, and the runtime starts none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding, PreflightRule
from dovetail.plugins import load_plugin_class
from dovetail_rewards.manager_config import HybridConfig, RemoteConfig


class RewardWorkers(PreflightRule):
    """`remote` is to score by workers, and the runtime has no processes for them."""

    name = "reward_workers"
    api = ">=1.0,<2"

    def check(self, config: Any, plan: Any) -> Iterator[Finding]:
        ref = None if plan is None else plan.refs.get("runtime")
        if ref is None or "task_workers" in load_plugin_class(ref).capabilities:
            return
        for key, workers in _asked("reward.manager", config.reward.manager):
            yield self.error(
                f"{key}.workers={workers}: runtime.name={ref.name} starts no further processes",
                hint=f"set runtime.name=ray; on one machine {key}.name=parallel scores in processes without it",
            )


def _asked(key: str, manager: object) -> Iterator[tuple[str, int]]:
    """Where a manager, or one inside of it, asks for workers, and for how many."""
    if isinstance(manager, RemoteConfig) and manager.workers is not None:
        yield key, manager.workers
    if isinstance(manager, HybridConfig):
        for name, scorer in manager.scorers.items():
            yield from _asked(f"{key}.scorers.{name}.manager", scorer.manager)
