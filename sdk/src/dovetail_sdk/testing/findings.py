"""The findings of a preflight rule in a config, for tests of rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.config import config_from_mapping
from dovetail.errors import PlanError
from dovetail.interfaces import Finding, PreflightRule
from dovetail.planning.plan import make_plan


def findings_of(
    rule: PreflightRule,
    *overrides: str,
    sections: Mapping[str, Any] | None = None,
    prompts: int | None = 1280,
) -> list[Finding]:
    """Return the findings of a preflight rule for a config and its plan, or for the config alone if no plan can be made.

    Args:
        rule: the rule's function.
        overrides: `key=value` overrides of the config.
        sections: config sections, to which the overrides are applied; without a model section, `model.path` is `tiny`.
        prompts: the number of training prompts in the plan, by default 10 batches of 128; None for a plan made before data is read.
    """
    config = config_from_mapping({"model": {"path": "tiny"}, **(sections or {})}, overrides).config
    try:
        plan = make_plan(config, prompts=prompts)
    except PlanError:
        plan = None
    name = getattr(rule, "__name__", "")
    return [attrs.evolve(finding, rule=name) for finding in rule(config, plan)]
