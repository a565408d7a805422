"""The models that a run needs, each with the reason why it exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from dovetail.dispatch.mesh import Mesh
from dovetail.errors import PlanError
from dovetail.interfaces.model_outputs import check_outputs
from dovetail.interfaces.model_shape import ModelShape
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.stage_list import PlannedStage
from dovetail.sections import (
    EngineSection,
    FollowSection,
    PlannedAdapter,
    PluginSection,
    RunConfig,
    TrainingSection,
)

FOLLOWS = "follows"
"""The capability of an engine whose models can follow the actor."""


@attrs.frozen(kw_only=True)
class ModelRole:
    """A role of the run, such as actor or critic, and its model."""

    role: str
    key: str
    """Key path of the role's section."""
    engine: PluginRef
    path: str
    head: Literal["lm", "value"] = "lm"
    because: str
    training: TrainingSection
    """Settings of token budget and offloading, and of the optimizer if the model is trained."""
    objective: ObjectiveSpec | None = None
    """Objective that trains the model, with its coefficients (`scalars`) as the config sets them; None if the model is not trained."""
    follows: FollowSection | None = None
    """Rule by which the model's weights follow the actor's; None if they do not."""
    mesh: Mesh = attrs.field(factory=Mesh)
    """Ranks of the role's worker group."""

    @property
    def trained(self) -> bool:
        """Whether the role has an optimizer."""
        return self.objective is not None

    @property
    def moves(self) -> bool:
        """Whether the model's weights change, by training or by following the actor; if so, checkpoints contain the model."""
        return self.trained or self.follows is not None

    @property
    def adapter(self) -> PlannedAdapter | None:
        """The adapter that is trained, as the engine's config describes it; None if the whole model is trained or nothing is."""
        return adapter_of(self.engine.config) if self.moves else None

    def parameters(self, shape: ModelShape) -> int:
        """Return the model's number of parameters without adapters; for a value model, also without the head."""
        return shape.parameters - (shape.head_parameters if self.head == "value" else 0)


def models_of(facts: PlanFacts, stages: Iterable[PlannedStage]) -> Iterator[ModelRole]:
    """Yield the policy, then each further model that a stage uses.

    Raises:
        ConfigError: an engine lacks an output that its role's objective needs.
        PlanError: the config has a role in `roles` that no stage uses, or a role that should follow the actor can't.
    """
    config = facts.config
    listed = list(stages)
    users = {role: stage for stage in reversed(listed) for role in stage.roles}
    for role in config.roles.keys() - users.keys():
        raise PlanError(
            f"roles.{role} is not used: no stage of the step computes with this role",
            hint=f"set roles.{role}.objective, add a stage that uses the role to algorithm.stages, or remove roles.{role}",
        )
    objectives = {role: spec for stage in listed for role, spec in stage.objectives.items()}
    followers = {role: how for stage in listed for role, how in stage.follows.items()}
    for role in ("actor", *(role for role in ("critic", "ref", *config.roles) if role in users)):
        engine, objective = facts.engine(role), objectives.get(role)
        head = _head(facts, role, objective)
        if objective is not None:
            check_outputs(engine.cls, engine.config, head, role, objective.outputs)
        follows = followers.get(role)
        if follows is not None:
            _check_follower(facts, role, head)
        yield ModelRole(
            role=role,
            key=config.role_key(role),
            engine=engine.ref,
            path=config.model_section(role).path,
            head=head,
            because=_reason(facts, role, users.get(role)),
            training=_training(config, role),
            objective=objective,
            follows=follows,
        )


def _check_follower(facts: PlanFacts, role: str, head: str) -> None:
    """Check that a role's model can follow the actor's weights.

    Raises:
        PlanError: the role is trained itself or has a value head, its engine or the actor's lacks the capability `follows`, or their
            adapters or the adapters' base models differ.
    """
    config, key = facts.config, f"{facts.config.role_key(role)}.update"
    leave_out = f"remove {key}"
    if role in config.roles and config.roles[role].objective is not None:
        raise PlanError(
            f"{key} computes the model of roles.{role} from the actor's weights, but roles.{role}.objective trains this model",
            hint=f"{leave_out}, or remove roles.{role}.objective",
        )
    if head != "lm":
        raise PlanError(
            f"{key} can't be used: roles.{role} has a value head, but the actor is a language model",
            hint=leave_out,
        )
    engines = [facts.engine("actor"), facts.engine(role)]
    for engine in engines:
        if FOLLOWS not in engine.cls.capabilities:
            raise PlanError(
                f"{key} needs the capability {FOLLOWS!r}, which {engine.title} lacks",
                hint=f"{leave_out}, or choose the engine fsdp2",
            )
    actor, own = (adapter_of(engine.config) for engine in engines)
    if actor != own:
        raise PlanError(
            f"{key} copies the actor's weights, but {engines[0].title} and {engines[1].title} configure different adapters",
            hint=f"remove {config.role_key(role)}.engine: the role then uses the actor's engine",
        )
    if actor is not None and config.model_section(role) != config.model:
        raise PlanError(
            f"{key} copies the actor's adapter, but the base models differ: the role's is {config.model_section(role).path}, the actor's is {config.model.path}",
            hint=f"remove {config.role_key(role)}.path and {config.role_key(role)}.override_config",
        )


def adapter_of(section: PluginSection) -> PlannedAdapter | None:
    """Return the adapter that an engine's config describes; None for full training."""
    if not isinstance(section, EngineSection):
        return None
    planned = section.planned_adapter()
    return planned if planned.rank is not None else None


def check_optimizers(facts: PlanFacts, models: Iterable[ModelRole]) -> None:
    """Check that the optimizer of each role works with the role's engine and ranks.

    Raises:
        PlanError: an optimizer does not support its role's engine or number of ranks; the error names an optimizer to use instead.
    """
    for model in models:
        if not model.trained:
            continue
        optimizer, allowed = (
            facts.plugins[f"{model.key}.optim"],
            facts.engine(model.role).cls.optimizers,
        )
        name, key = optimizer.ref.name, f"{model.key}.optim.name"
        if allowed is not None and name not in allowed:
            raise PlanError(
                f"{key} = {name}, but engine {model.engine.name!r} does not support this optimizer; expected one of {', '.join(sorted(allowed))}",
                hint=f"set {key}={min(allowed)}, or use another engine",
            )
        if model.mesh.size > 1 and "sharded" not in optimizer.cls.capabilities:
            raise PlanError(
                f"{key} = {name} does not support parameters that are divided over ranks, but {model.role} has {model.mesh.size} ranks",
                hint=f"set {key}=adamw, or give the role a pool of one rank",
            )


def _head(facts: PlanFacts, role: str, objective: ObjectiveSpec | None) -> Literal["lm", "value"]:
    """Return the head of a role's model. An actor that generates nothing has a value head if its objective reads values."""
    if role in facts.config.roles:
        return facts.config.roles[role].head
    if role == "actor" and objective is not None and not facts.plugins["source"].cls.follows:
        return "value" if "values" in objective.output_names else "lm"
    return "value" if role == "critic" else "lm"


def _training(config: RunConfig, role: str) -> TrainingSection:
    """Return the training settings of a role.

    A role that is never trained, such as `ref`, has only a token budget and `offload`; it gets the actor's section with these two replaced.
    """
    section = config.role_sections[role]
    if isinstance(section, TrainingSection):
        return section
    budget = section.max_tokens_per_micro_batch or config.actor.max_tokens_per_micro_batch
    return attrs.evolve(config.actor, max_tokens_per_micro_batch=budget, offload=section.offload)


def _reason(facts: PlanFacts, role: str, user: PlannedStage | None) -> str:
    if user is None or role == "actor":
        return "the policy"
    for column in sorted(user.provides & facts.required.keys()):
        return f"{facts.required[column]} requires {column}"
    return f"the stage {user.name} computes with it"
