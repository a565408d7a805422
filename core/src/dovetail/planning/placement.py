"""Placement: which pool each role lives in, the mesh of every training group, and the rollout's replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dovetail.dispatch.mesh import Mesh
from dovetail.errors import DispatchError, PlanError
from dovetail.interfaces.stage import SelectedPlugin
from dovetail.planning.models import ModelRole
from dovetail.planning.resolved_plugins import default_transport
from dovetail.sections import EngineSection, RolloutSection, RunConfig
from dovetail.sections.placement import Pool

ROLLOUT = "rollout"
ACTOR = "actor"


@attrs.frozen(kw_only=True)
class Placement:
    """Where everything of a run lives."""

    pools: tuple[Pool, ...]
    replicas: int
    """Rollout replicas."""
    runtime: str
    """The runtime's name."""
    in_process: bool
    ends_meet: bool = False
    """Whether both ends of a weight update run at once, since the sender waits for its receivers."""
    environments: Mapping[str, str] = attrs.field(factory=dict)
    """Role → the environment that its processes run in, where it is one of its own."""
    joined: int = 0
    """Rollout engines that run already, one a replica; 0 where each replica starts its own."""
    engine_ranks: int | None = None
    """Ranks of each replica's engine, where it computes in processes that the replica starts; None where it computes in
    the replica's own."""

    def pool(self, role: str) -> Pool:
        """Where a role lives."""
        return next(pool for pool in self.pools if role in pool.roles)

    def lines(self, models: Sequence[ModelRole]) -> list[str]:
        """A line a pool: its size, and who lives there on which mesh."""
        if self.in_process:
            if self.engine_ranks is None and not self.joined:
                return [f"every role in one worker ({self.runtime})"]
            trained = " + ".join(model.role for model in models)
            return [f"{trained} in this process ({self.runtime})", self._rollout()]
        meshes = {model.role: model.mesh.described() for model in models}
        lines = []
        for pool in self.pools:
            training = [role for role in pool.roles if role in meshes]
            who = [f"{' + '.join(training)} ({meshes[training[0]]})"] if training else []
            if len({meshes[role] for role in training}) > 1:
                who = [f"{role} ({meshes[role]})" for role in training]
            if ROLLOUT in pool.roles:
                who.append(self._rollout())
            lines.append(f"pool {pool.name} ({self.runtime}): {pool.described()}: {', '.join(who)}")
        lines += [f"{role} runs in {path}" for role, path in self.environments.items()]
        return lines

    def _rollout(self) -> str:
        """How many replicas there are, and where their engines compute."""
        if self.joined:
            return f"rollout × {self.replicas}, each an engine that runs already"
        if self.engine_ranks is None:
            return f"rollout × {self.replicas}"
        ranks = "1 rank" if self.engine_ranks == 1 else f"{self.engine_ranks} ranks"
        each = ", each" if self.replicas > 1 else ""
        return f"rollout × {self.replicas}{each} with an engine of {ranks} in processes of its own"


def place(
    config: RunConfig, chosen: Mapping[str, SelectedPlugin], models: Sequence[ModelRole]
) -> tuple[Placement, tuple[ModelRole, ...]]:
    """Where everything goes: pools and, where there is a rollout, its replicas; and the models with their meshes.

    Raises:
        PlanError: sizes that do not fit each other, a weight transport that can't reach the rollout, weights of a
            kind that the rollout can't take, or a rollout that is to sleep and can't.
    """
    generates = ROLLOUT in chosen
    roles = tuple(model.role for model in models) + ((ROLLOUT,) if generates else ())
    placement = Placement(
        pools=config.runtime.pools_for(roles),
        replicas=0,
        runtime=chosen["runtime"].ref.name,
        in_process=config.runtime.in_process,
        environments=config.runtime.environments,
    )
    if generates:
        placement = attrs.evolve(
            placement,
            replicas=replicas_in(config, placement.pool(ROLLOUT)),
            joined=config.rollout.joined,
            engine_ranks=None if config.rollout.in_process else config.rollout.ranks_per_replica(),
            ends_meet="ends_meet" in chosen["rollout.weight_transport"].cls.capabilities,
        )
        _check_transport(config, chosen["rollout.weight_transport"], chosen["rollout"])
        _check_kind(config.rollout, models, chosen["rollout"])
        _check_offload(config, chosen["rollout"])
    return placement, tuple(
        attrs.evolve(model, mesh=_mesh(model, placement.pool(model.role))) for model in models
    )


def _mesh(model: ModelRole, pool: Pool) -> Mesh:
    section: Any = model.engine.config
    axes: dict[str, Any] = dict(section.mesh_axes()) if isinstance(section, EngineSection) else {}
    try:
        mesh = Mesh.over(pool.ranks, **axes)
        if isinstance(section, EngineSection):
            section.shards(mesh.size)
    except PlanError as error:
        error.during(f"{model.role} over pool {pool.name!r} ({pool.described()})")
        raise
    except DispatchError as error:
        raise PlanError(
            f"{model.role} can't be laid out over pool {pool.name!r} ({pool.described()}): {error.message}",
            hint=error.hint,
        ) from error
    return mesh


def replicas_in(config: RunConfig, pool: Pool) -> int:
    """Return how many rollout replicas a pool has.

    Raises:
        PlanError: those that the config asks for do not fit it.
    """
    joined = config.rollout.joined
    if joined:
        if config.rollout.replicas not in {None, joined}:
            raise PlanError(
                f"rollout.replicas={config.rollout.replicas}, but rollout {config.rollout.name!r} is to join "
                f"{joined} engines that run already, one a replica",
                hint="leave rollout.replicas out",
            )
        return joined
    each = config.rollout.ranks_per_replica()
    if config.runtime.in_process:
        return config.rollout.replicas or 1
    if each > pool.ranks:
        raise PlanError(
            f"one rollout replica takes {each} ranks, but pool {pool.name!r} has {pool.described()}",
            hint="give the pool more, or set the engine's parallel sizes lower",
        )
    fitting = pool.ranks // each
    wanted = config.rollout.replicas or fitting
    if wanted > fitting and pool.accelerators:
        raise PlanError(
            f"rollout.replicas={wanted} need {wanted * each} accelerators, but pool {pool.name!r} has "
            f"{pool.described()}",
            hint=f"set rollout.replicas={fitting} or leave it out",
        )
    return wanted


def _check_transport(config: RunConfig, transport: SelectedPlugin, rollout: SelectedPlugin) -> None:
    one_process = config.runtime.in_process and config.rollout.in_process
    if not one_process and "in_process" in transport.cls.capabilities:
        apart = (
            f"rollout {rollout.ref.name!r} loads them in processes of its own"
            if not config.rollout.in_process
            else f"runtime {config.runtime.name!r} puts trainer and rollout in different ones"
        )
        raise PlanError(
            f"rollout.weight_transport {transport.ref.name!r} hands weights over within one process, but {apart}",
            hint=f"leave rollout.weight_transport out ({default_transport(config)!r} is taken), or name another",
        )
    if one_process and "ends_meet" in transport.cls.capabilities:
        raise PlanError(
            f"rollout.weight_transport {transport.ref.name!r} needs trainer and rollout to run at once, but runtime "
            f"{config.runtime.name!r} runs one after the other in this process",
            hint=f"leave rollout.weight_transport out ({default_transport(config)!r} is taken)",
        )


def _check_offload(config: RunConfig, rollout: SelectedPlugin) -> None:
    if config.rollout.offload and "sleep" not in rollout.cls.capabilities:
        raise PlanError(
            f"rollout.offload=true asks rollout {rollout.ref.name!r} to sleep between rollouts, and it lacks the "
            "capability 'sleep'",
            hint="leave rollout.offload out, or choose a rollout with that capability: "
            "`dovetail plugins list rollout` shows them",
        )


def _check_kind(
    section: RolloutSection, models: Sequence[ModelRole], rollout: SelectedPlugin
) -> None:
    actor = next((model.engine for model in models if model.role == ACTOR), None)
    if actor is None or not isinstance(actor.config, EngineSection):
        return
    if actor.config.weight_kind() != "adapter":
        return
    if "lora" not in rollout.cls.capabilities:
        raise PlanError(
            f"actor.engine {actor.name!r} is set to send its adapter alone, which rollout {rollout.ref.name!r} can't "
            "apply: it lacks the capability 'lora'",
            hint="let the engine send merged weights (`lora.sync: merged` where the engine is fsdp2 or megatron), or choose a "
            "rollout with that capability: `dovetail plugins list rollout` shows them",
        )
    problem = section.unfit_adapter(actor.config.planned_adapter())
    if problem is not None:
        raise PlanError(
            f"actor.engine {actor.name!r} is set to send its adapter alone, and rollout {rollout.ref.name!r} {problem}",
            hint="or let the engine send merged weights (`lora.sync: merged` where the engine is fsdp2 or megatron)",
        )
