"""The models that a run needs, each with the reason why it exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from dovetail.dispatch.mesh import Mesh
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.stage_list import PlannedStage
from dovetail.stages.update_actor import actor_objective
from dovetail.stages.update_critic import critic_objective
from dovetail.training.outputs import check_outputs


@attrs.frozen(kw_only=True)
class ModelRole:
    """A model that must exist."""

    role: str
    engine: PluginRef
    path: str
    trained: bool
    head: Literal["lm", "value"] = "lm"
    because: str
    objective: ObjectiveSpec | None = None
    """What it minimises, with the scalars of the config; None for a model that is not trained."""
    mesh: Mesh = attrs.field(factory=Mesh)
    """The ranks of its worker group."""


def models_of(facts: PlanFacts, stages: Iterable[PlannedStage]) -> Iterator[ModelRole]:
    """Yield the policy, and the models that stages compute with.

    Raises:
        ConfigError: an engine does not give an output that its role's objective needs.
    """
    config = facts.config
    users = {role: stage for stage in reversed(list(stages)) for role in stage.roles}
    yield ModelRole(
        role="actor",
        engine=facts.plugins["actor.engine"].ref,
        path=config.model.path,
        trained=True,
        because="the policy",
        objective=_given(facts, "actor", "lm", actor_objective(facts)),
    )
    if "critic" in users:
        yield ModelRole(
            role="critic",
            engine=facts.engine("critic").ref,
            path=config.critic.path or config.model.path,
            trained=True,
            head="value",
            because=_reason(facts, "values", users["critic"]),
            objective=_given(facts, "critic", "value", critic_objective(facts)),
        )
    if "ref" in users:
        yield ModelRole(
            role="ref",
            engine=facts.engine("ref").ref,
            path=config.ref.path or config.model.path,
            trained=False,
            because=_reason(facts, "ref_log_probs", users["ref"]),
        )


def _given(
    facts: PlanFacts, role: str, head: Literal["lm", "value"], objective: ObjectiveSpec
) -> ObjectiveSpec:
    """Return the objective, whose outputs the role's engine gives."""
    engine = facts.engine(role)
    check_outputs(engine.cls, engine.config, head, role, objective.outputs)
    return objective


def _reason(facts: PlanFacts, column: str, user: PlannedStage) -> str:
    if column in facts.required:
        return f"{facts.required[column]} requires {column}"
    return f"the stage {user.name} computes with it"
