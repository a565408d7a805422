"""Preflight rules for serving engines: the model can be divided over a replica's ranks, and the engine's release is supported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces import Finding
from dovetail_serving.division import refuse_indivisible
from dovetail_serving.section import ServingSection


def rollout_layout(config: Any, plan: Any) -> Iterator[Finding]:
    """Report an error if the model's attention heads or experts can't be divided evenly over a replica's ranks.

    The rule reads the config in the model's directory, since the engine would report the error only minutes later, at its start. See
    `refuse_indivisible` for the conditions.
    """
    rollout = config.rollout
    if not isinstance(rollout, ServingSection) or rollout.joined:
        return
    if plan is not None and not plan.generates:
        return
    spread = getattr(rollout, "expert_parallel_size", None) or 1
    try:
        refuse_indivisible(config.model, ranks=rollout.attention_ranks(), spread=spread)
    except ConfigError as error:
        yield Finding.error(error.message, hint=error.hint)


def engine_release(config: Any, plan: Any) -> Iterator[Finding]:
    """Warn if the installed engine is newer than every tested release; if it lacks a name that the plugin imports, report an error.

    The rule reads the engine's sources without importing them. An engine in a separate Python environment is checked at its start.
    """
    rollout = config.rollout
    if not isinstance(rollout, ServingSection) or rollout.joined:
        return
    engine = None if "rollout" in config.runtime.roles_apart else rollout.driven
    if engine is None or (plan is not None and not plan.generates):
        return
    if (release := engine.installed()) is None:
        return  # the plugin's needs report a missing engine
    if gone := engine.missing_names():
        yield Finding.error(
            f"the installed {release} lacks names that the plugin imports: {', '.join(gone)}; {engine.tried}",
            hint=f"install one of the tested releases of {engine.title}",
        )
    elif engine.untried(release):
        yield Finding.warning(
            f"the installed {release} is untested: {engine.tried}",
            hint="all names that the plugin imports exist, so a short run may succeed: try one, or install a tested release",
        )
