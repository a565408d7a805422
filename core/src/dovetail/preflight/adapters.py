"""Rules about low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.config.sections import RunConfig
from dovetail.errors import ModelError, nearest
from dovetail.interfaces.preflight import Finding, PreflightRule

if TYPE_CHECKING:
    from dovetail.flow.model_shape import ModelShape
    from dovetail.flow.plan import Plan


class AdapterTargets(PreflightRule):
    """An adapter is to be put on layers that the model does not have.

    The model's own config tells which there are. A model that can't be read here is left to the engine to judge.
    """

    name = "adapter_targets"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.flow.adapters import planned_adapter
        from dovetail.flow.model_shape import read_shape

        seen: set[tuple[str, str]] = set()
        for role in plan.models if plan is not None else ():
            planned = planned_adapter(role)
            for target in planned.target_modules if planned is not None else ():
                try:
                    shape = read_shape(config.model, role.path)
                except ModelError:
                    break
                if shape.matching(target) or (target, role.path) in seen:
                    continue
                seen.add((target, role.path))
                section = _section(config, role.role)
                yield self.error(
                    f"{section}: the adapter is to be put on {target!r}, and {role.path} has no module of that name",
                    hint=_layers(target, shape),
                )


def _section(config: RunConfig, role: str) -> str:
    """The key path of what selects a role's engine."""
    own = getattr(getattr(config, role, None), "engine", None)
    return f"{role if own is not None else 'actor'}.engine"


def _layers(target: str, shape: ModelShape) -> str:
    known = sorted({name.rpartition(".")[2] for name in shape.layers})
    near = nearest(target.rpartition(".")[2], known)
    return (f"did you mean {near!r}? " if near else "") + f"Its layers are {', '.join(known)}"
