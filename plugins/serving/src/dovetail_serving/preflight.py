"""A rule about replicas of serving engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces import Finding
from dovetail_serving.division import refuse_indivisible
from dovetail_serving.section import ServingSection


def rollout_layout(config: Any, plan: Any) -> Iterator[Finding]:
    """A replica of a serving engine is to have more ranks than divide the model's heads, or its experts.

    The model's config in its directory tells; the engine would say so minutes later, on its accelerators.
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
