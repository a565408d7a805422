"""Preflight rules for reward managers that need processes of the runtime, or a model directory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.errors import ModelError
from dovetail.interfaces import Finding
from dovetail.plugins import load_plugin_class
from dovetail_datasets import refuse_missing_model
from dovetail_rewards.manager_config import HybridConfig, RemoteConfig
from dovetail_rewards.model_config import ScoringModelConfig


def reward_workers(config: Any, plan: Any) -> Iterator[Finding]:
    """Report an error if `remote` is configured with `workers`, but the runtime can't start worker processes."""
    ref = None if plan is None else plan.refs.get("runtime")
    if ref is None or "task_workers" in load_plugin_class(ref).capabilities:
        return
    for key, manager in _managers("reward.manager", config.reward.manager):
        if isinstance(manager, RemoteConfig) and manager.workers is not None:
            yield Finding.error(
                f"{key}.workers={manager.workers}: runtime.name={ref.name} can't start worker processes",
                hint=f"set runtime.name=ray; or set {key}.name=parallel, which starts processes on this machine without Ray",
            )


def reward_model_missing(config: Any, plan: Any) -> Iterator[Finding]:
    """Report an error if the directory configured for a scoring model does not exist. Hub ids are not checked."""
    if plan is not None and not plan.generates:
        return
    for key, manager in _managers("reward.manager", config.reward.manager):
        if isinstance(manager, ScoringModelConfig):
            try:
                refuse_missing_model(manager.model)
            except ModelError as error:
                yield Finding.error(
                    f"{key}.model: {error.message}",
                    hint=f"set {key}.model= to a directory in Hugging Face format, or to a hub id",
                )


def _managers(key: str, manager: object) -> Iterator[tuple[str, object]]:
    """Yield a manager and the managers inside it, each with its config key."""
    yield key, manager
    if isinstance(manager, HybridConfig):
        for name, scorer in manager.scorers.items():
            yield from _managers(f"{key}.scorers.{name}.manager", scorer.manager)
