"""The models that a run needs, each with the reason why it exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from dovetail.dispatch.mesh import Mesh
from dovetail.errors import PlanError
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.stage_list import PlannedStage
from dovetail.sections import ActorSection, RunConfig, TrainingSection
from dovetail.stages.update_actor import actor_objective
from dovetail.stages.update_critic import critic_objective
from dovetail.stages.update_roles import role_objectives
from dovetail.training.outputs import check_outputs

_COLUMN = {"critic": "values", "ref": "ref_log_probs"}
"""The column that a role exists for."""


@attrs.frozen(kw_only=True)
class ModelRole:
    """A model that must exist."""

    role: str
    key: str
    """Key path of the role's section."""
    engine: PluginRef
    path: str
    head: Literal["lm", "value"] = "lm"
    because: str
    training: TrainingSection
    """Token budget and offloading; optimizer, where it is trained."""
    objective: ObjectiveSpec | None = None
    """What it minimises, with the scalars of the config; None for a model that is not trained."""
    mesh: Mesh = attrs.field(factory=Mesh)
    """The ranks of its worker group."""

    @property
    def trained(self) -> bool:
        """Whether its weights move."""
        return self.objective is not None


def models_of(facts: PlanFacts, stages: Iterable[PlannedStage]) -> Iterator[ModelRole]:
    """Yield the policy, and the models that stages compute with.

    Raises:
        ConfigError: an engine does not give an output that its role's objective needs.
        PlanError: no stage computes with a role of `roles`.
    """
    config = facts.config
    users = {role: stage for stage in reversed(list(stages)) for role in stage.roles}
    for role in config.roles.keys() - users.keys():
        raise PlanError(
            f"no stage of the step computes with roles.{role}",
            hint=f"give it an objective, name a stage in algorithm.stages that computes with it, or remove roles.{role}",
        )
    objectives = role_objectives(facts) | {"actor": actor_objective(facts)}
    if "critic" in users:
        objectives["critic"] = critic_objective(facts)
    for role in ("actor", *(role for role in ("critic", "ref", *config.roles) if role in users)):
        engine, objective, head = facts.engine(role), objectives.get(role), _head(config, role)
        if objective is not None:
            check_outputs(engine.cls, engine.config, head, role, objective.outputs)
        yield ModelRole(
            role=role,
            key=config.role_key(role),
            engine=engine.ref,
            path=_path(config, role),
            head=head,
            because=_reason(facts, role, users.get(role)),
            training=_training(config, role),
            objective=objective,
        )


def _head(config: RunConfig, role: str) -> Literal["lm", "value"]:
    if role in config.roles:
        return config.roles[role].head
    return "value" if role == "critic" else "lm"


def _path(config: RunConfig, role: str) -> str:
    section = config.role_sections[role]
    own = None if isinstance(section, ActorSection) else section.path
    return own or config.model.path


def _training(config: RunConfig, role: str) -> TrainingSection:
    """The section of a role; for the reference the actor's, with what it has of its own."""
    section = config.role_sections[role]
    if isinstance(section, TrainingSection):
        return section
    budget = section.max_tokens_per_micro_batch or config.actor.max_tokens_per_micro_batch
    return attrs.evolve(config.actor, max_tokens_per_micro_batch=budget, offload=section.offload)


def _reason(facts: PlanFacts, role: str, user: PlannedStage | None) -> str:
    if user is None or role == "actor":
        return "the policy"
    column = _COLUMN.get(role, "")
    if column in facts.required:
        return f"{facts.required[column]} requires {column}"
    return f"the stage {user.name} computes with it"
