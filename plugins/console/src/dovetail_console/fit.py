"""Settings under which a run fits accelerators of a given memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import attrs

from dovetail.errors import DovetailError
from dovetail.interfaces import MemoryRules
from dovetail.planning import Plan
from dovetail.sections import EngineSection
from dovetail_console.memory import Measured, PlannedMemory, estimate_memory

USABLE = 0.93
"""Share of an accelerator's memory that a plan may fill: the rest is for contexts of processes, kernels' own buffers and fragmentation."""

_CACHES = 1 / 8
"""Fraction of a step's KV caches for which a rollout engine's share of an accelerator must have room after the share is lowered."""

Changes = Mapping[str, object]
Planned = Callable[[Changes], Plan]


@attrs.frozen(kw_only=True)
class Fit:
    """The result of `fitting`: config changes, and whether the run with them fits the accelerators' memory."""

    card: int
    """Memory of an accelerator, in bytes."""
    fits: bool
    changes: Changes
    """Keys of the config and their new values; if nothing fits, the changes tried last."""
    least: int
    """Bytes that a step needs at least with these changes: the maximum of `PlannedMemory.least` over its phases."""


def fitting(planned: Planned, card: int) -> Fit:
    """Find the cheapest config changes that make the run fit the accelerators' memory.

    Changes are added in order of their cost until the run fits; then unnecessary changes are undone.

    Args:
        planned: a function that returns the plan of the config with given changes of keys.
        card: memory of an accelerator in bytes.

    Raises:
        DovetailError: the unchanged config can't be planned.
    """
    judge = partial(_judged, planned, card, {})
    found, steps = judge({}), list[Changes]()
    for step in _candidates(planned({})):
        if found.fits:
            break
        tried = _tried(judge, [*steps, step])
        if tried is not None:
            found = tried
            steps.append(step)
    for step in reversed(steps) if found.fits else ():
        others = [other for other in steps if other is not step]
        fewer = _tried(judge, others)
        if fewer is not None and fewer.fits:
            found, steps = fewer, others
    return found


def _tried(judge: Callable[[Changes], Fit], steps: Iterable[Changes]) -> Fit | None:
    """Return the `Fit` of a run with the changes of all `steps` together; None if the run can't be planned with them."""
    changes = {key: value for step in steps for key, value in step.items()}
    try:
        return judge(changes)
    except DovetailError:
        return None


def _judged(planned: Planned, card: int, measured: Measured, changes: Changes) -> Fit:
    """Return the `Fit` of a run with these changes. If the run does not fit, try a smaller share of the accelerator for the rollout engine.

    The share is then the largest that leaves enough memory for the models, provided that it is enough for the engine too. `measured` is
    the cache of `estimate_memory`.

    Raises:
        DovetailError: the run can't be planned.
    """
    plan, usable = planned(changes), round(card * USABLE)
    memory = estimate_memory(plan, card=card, measured=measured)
    for role, rule in _rules(plan).items():
        if rule.share is not None and role in _taken(plan) and _least(memory) > usable:
            beside = max(memory.least(phase) - taken for phase, taken in memory.rollout.items())
            each = card * rule.engines  # a share applies to one engine
            room = int(100 * (usable - beside) / each) / 100
            first, *rest = _taken(plan)[role].values()
            if (first + sum(rest) * _CACHES) / each <= room < rule.share:
                changes = {**changes, rule.share_key: room}
                plan = planned(changes)
                memory = estimate_memory(plan, card=card, measured=measured)
    least = _least(memory)
    return Fit(card=card, fits=least <= usable, changes=dict(changes), least=least)


def _least(memory: PlannedMemory) -> int:
    return max(memory.least(phase) for phase in memory.phases)


def _rules(plan: Plan) -> Mapping[str, MemoryRules]:
    source = plan.facts.plugins["source"]
    found: Mapping[str, MemoryRules] = source.cls.memory_rules(source.config, plan)
    return found


def _taken(plan: Plan) -> Mapping[str, Mapping[str, int]]:
    source = plan.facts.plugins["source"]
    found: Mapping[str, Mapping[str, int]] = source.cls.memory(source.config, plan)
    return found


def _candidates(plan: Plan) -> Iterator[Changes]:
    """Yield changes, those with the least cost for the run first."""
    config = plan.facts.config
    for rule in _rules(plan).values():
        if rule.sleep_key is not None:
            yield {rule.sleep_key: True}
    for model in plan.models:
        if "offload" in plan.facts.engine(model.role).cls.capabilities:
            yield {f"{model.key}.offload": True}
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = {model.key: model.training.max_tokens_per_micro_batch for model in plan.models}
    while max(tokens.values()) >= 2 * longest:
        tokens = {key: max(longest, size // 2) for key, size in tokens.items()}
        yield {f"{key}.max_tokens_per_micro_batch": size for key, size in tokens.items()}
    for model in plan.models:
        section = model.engine.config
        for settings in section.lighter() if isinstance(section, EngineSection) else ():
            yield {f"{model.key}.engine.{key}": value for key, value in settings.items()}
