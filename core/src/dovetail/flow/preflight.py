"""What can be known to be wrong before a run starts: data, model, plan, and the rules of installed plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.config import LoadedConfig
from dovetail.errors import ConfigError
from dovetail.flow.build import load_data, plan_from_data
from dovetail.flow.plan import Plan
from dovetail.flow.reward_functions import build_functions, check_sources
from dovetail.interfaces import make_plugin
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.preflight import Finding


def run_checks(loaded: LoadedConfig) -> Iterator[str]:
    """Check everything short of loading weights; yield a line for each thing found in order.

    Raises:
        DovetailError: the first thing that is wrong.
    """
    config = loaded.config
    data = load_data(config)
    yield f"data: {len(data.train.prompts):,} training prompts, {len(data.val.prompts) if data.val else 0:,} held out"
    if data.train.filtered_overlong:
        yield (
            f"data: {data.train.filtered_overlong:,} prompts longer than "
            f"{config.data.max_prompt_length} tokens are left out"
        )
    functions = build_functions(config.reward, PluginContext(seed=config.seed))
    check_sources(functions, data.train.prompts)
    yield "reward: every data source has a function"
    plan = plan_from_data(config, data)
    runtime: Any = make_plugin(plan.refs["runtime"], PluginContext(seed=config.seed))
    yield f"runtime: {plan.refs['runtime'].name} on {runtime.device()}"
    for what, how_many in plan.counts.rows():
        yield f"plan: {what}: {how_many}"
    findings = list(rule_findings(loaded, plan))
    for finding in findings:
        yield f"{finding.severity}: {finding.message} [{finding.rule}]"
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        raise ConfigError(
            f"{len(errors)} preflight rule(s) refuse this config",
            problems=[f.message for f in errors],
            hint=errors[0].hint,
        )


def rule_findings(loaded: LoadedConfig, plan: Plan) -> Iterator[Finding]:
    """What the installed preflight rules say of a config and its plan."""
    from dovetail.interfaces.runtime import PluginRef
    from dovetail.plugins.index import default_index

    for entry in default_index().entries("preflight"):
        if entry.state != "compatible":
            continue
        ref = PluginRef(kind="preflight", name=entry.name, distribution=entry.distribution)
        rule = make_plugin(ref, PluginContext())
        yield from rule.check(loaded.config, plan)  # type: ignore[attr-defined]
