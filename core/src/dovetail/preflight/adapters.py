"""Rules about low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.errors import ConfigError, ModelError, nearest
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.model_shape import ModelShape, read_shape
from dovetail.planning.models import ModelRole
from dovetail.planning.plan import Plan
from dovetail.sections import RunConfig


class AdapterTargets(PreflightRule):
    """An adapter is to be put on what the model does not have, or on what can't have one.

    The model's own config tells which layers there are, and which share a weight. A model that can't be read here is left to the
    engine to judge.
    """

    name = "adapter_targets"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.planning.adapters import planned_adapter

        told: set[str] = set()
        for role in plan.models if plan is not None else ():
            planned = planned_adapter(role)
            for target in planned.target_modules if planned is not None else ():
                try:
                    shape = read_shape(config.model, role.path)
                except ModelError:
                    break
                problem = _problem(target, shape, role)
                if problem is None:
                    continue
                message = f"{_section(plan, role)}: {problem.message}"
                if message not in told:
                    told.add(message)
                    yield self.error(message, hint=problem.hint)


def _problem(target: str, shape: ModelShape, role: ModelRole) -> ConfigError | None:
    """What is wrong with one target; what engines find too, in the same words."""
    from dovetail.training.adapter import no_matrix, shared_weight

    named = sorted(shape.matching(target))
    if not named:
        return ConfigError(
            f"the adapter is to be put on {target!r}, and {role.path} has no module of that name",
            hint=_layers(target, shape),
        )
    for name in named:
        if name not in shape.matrices:
            linear = [n for n, layer in shape.layers.items() if layer.linear]
            return no_matrix(target, name, linear)
        # With a value head in place of the output layer, nothing shares its weight.
        if role.head == "lm" and name in shape.layers and shape.layers[name].shared:
            return shared_weight(name)
    return None


def _section(plan: Plan | None, role: ModelRole) -> str:
    """The key path of what selects a role's engine."""
    own = f"{role.key}.engine"
    return own if plan is not None and own in plan.refs else "actor.engine"


def _layers(target: str, shape: ModelShape) -> str:
    known = sorted({name.rpartition(".")[2] for name in shape.layers})
    near = nearest(target.rpartition(".")[2], known)
    return (f"did you mean {near!r}? " if near else "") + f"Its layers are {', '.join(known)}"
