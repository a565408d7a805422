"""Rules about the Python environments of roles: whether those that a config names can do their work."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.errors import DovetailError
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.interfaces.runtime import PluginRef
from dovetail.planning.plan import Plan
from dovetail.plugins.load import find
from dovetail.plugins.needs import install_command
from dovetail.sections import RunConfig

_ROLLOUT = ("rollout", "rollout.weight_transport")
_TRAINING = (
    "algorithm.policy_loss",
    "algorithm.loss_aggregation",
    "algorithm.rollout_correction",
)


class EnvironmentUnfit(PreflightRule):
    """An environment of `runtime.environments` is not on this machine, lacks what its role needs, or does not fit; or the machine has
    fewer accelerators than the pools of `runtime` ask for.

    It is a warning, since the run may take place on another machine; there it is an error before anything starts.
    """

    name = "environment_unfit"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.plugins.isolation import (
            environment_problems,
            facts_here,
            facts_of,
            interpreter_of,
        )

        if plan is None:
            return
        if (shortage := config.runtime.shortage(plan.placement.pools)) is not None:
            yield self.warning(f"runtime: {shortage.message}", hint=shortage.hint)
        for role, path in config.runtime.environments.items():
            key = f"runtime.environments.{role}"
            wanted = [
                {"kind": ref.kind, "name": ref.name, "distribution": ref.distribution}
                for ref in _refs(plan, role)
                if ref.path is None
            ]
            try:
                there = facts_of(interpreter_of(path, key), wanted)
            except DovetailError as error:
                yield self.warning(error.message, hint=error.hint)
                continue
            for problem in environment_problems(facts_here(wanted), there):
                yield self.warning(f"{key}={path!r}: {problem.message}", hint=problem.hint)


class EnvironmentMissing(PreflightRule):
    """A plugin that gets an environment of its own has none in the config, and what it needs is not in this one."""

    name = "environment_missing"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None:
            return
        roles = [*(["rollout"] if plan.generates else []), *(model.role for model in plan.models)]
        for role in roles:
            ref = _refs(plan, role)[0]
            if role in config.runtime.roles_apart or ref.path is not None:
                continue
            if role == "rollout" and config.rollout.joined:
                continue  # what it needs is where the engines run that it joins
            entry = find(ref)
            unmet = [need for need in entry.needs if not need.met]
            if not unmet or entry.manifest is None or not entry.manifest.isolated:
                continue
            wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
            command = install_command(entry.distribution, unmet)
            yield self.error(
                f"{entry.kind} {entry.name!r} of {entry.distribution} needs {wanted}, and an environment of its own, "
                f"which the config does not name",
                hint=f"make one (`python -m venv DIRECTORY`, and in it `{command}` with dovetail-runtime-ray), then set "
                f"runtime.name=ray runtime.environments.{role}=DIRECTORY",
            )


def _refs(plan: Plan, role: str) -> list[PluginRef]:
    """The plugins that a role's processes load, its own first."""
    if role == "rollout":
        return [plan.refs[path] for path in _ROLLOUT]
    (model,) = (model for model in plan.models if model.role == role)
    own = [model.engine, *([model.objective.plugin] if model.objective else [])]
    besides = [plan.refs[path] for path in _TRAINING if path in plan.refs]
    sends = role == "actor" and plan.generates
    transport = [plan.refs["rollout.weight_transport"]] if sends else []
    steps = [f"{model.key}.optim", f"{model.key}.optim.schedule"] if model.trained else []
    return [*own, *transport, *besides, *(plan.refs[path] for path in steps)]
