"""Placement: the pool of each role, the mesh of every training group, and the experience source's own processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dovetail.dispatch.mesh import Mesh
from dovetail.errors import DispatchError, PlanError
from dovetail.interfaces.source import SourcePlacement
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.models import ModelRole
from dovetail.sections import EngineSection
from dovetail.sections.placement import Pool


@attrs.frozen(kw_only=True)
class Placement:
    """The pools, meshes and processes of a run."""

    pools: tuple[Pool, ...]
    runtime: str
    """The runtime's name."""
    in_process: bool
    source: Any
    """Layout of the experience source's own processes: a SourcePlacement, or the source's subclass of it."""
    environments: Mapping[str, str] = attrs.field(factory=dict)
    """Path of the Python environment by role, for roles that have their own environment."""

    def pool(self, role: str) -> Pool:
        """Return the pool that a role is placed in."""
        return next(pool for pool in self.pools if role in pool.roles)

    def lines(self, models: Sequence[ModelRole]) -> list[str]:
        """Return lines that describe the placement: each pool with its size, roles and meshes, and each role with its own environment."""
        placed: SourcePlacement = self.source
        if self.in_process:
            if not placed.apart:
                return [f"every role in one worker ({self.runtime})"]
            trained = " + ".join(model.role for model in models)
            return [f"{trained} in this process ({self.runtime})", *placed.described.values()]
        meshes = {model.role: model.mesh.described() for model in models}
        lines = []
        for pool in self.pools:
            training = [role for role in pool.roles if role in meshes]
            who = [f"{' + '.join(training)} ({meshes[training[0]]})"] if training else []
            if len({meshes[role] for role in training}) > 1:
                who = [f"{role} ({meshes[role]})" for role in training]
            who += [text for role, text in placed.described.items() if role in pool.roles]
            lines.append(f"pool {pool.name} ({self.runtime}): {pool.described()}: {', '.join(who)}")
        lines += [f"{role} runs in {path}" for role, path in self.environments.items()]
        return lines


def place(facts: PlanFacts, models: Sequence[ModelRole]) -> tuple[Placement, tuple[ModelRole, ...]]:
    """Assign the models and the source's processes to pools, and return the placement, and the models with their meshes.

    Raises:
        PlanError: a pool or a mesh has a size that does not fit, or the experience source refuses the placement.
    """
    config, source = facts.config, facts.plugins["source"]
    roles = (*(model.role for model in models), *source.cls.roles)
    pools = config.runtime.pools_for(roles)
    homes = {role: pool for pool in pools for role in pool.roles}
    placement = Placement(
        pools=pools,
        runtime=facts.plugins["runtime"].ref.name,
        in_process=config.runtime.in_process,
        source=source.cls.placed(source.config, facts, homes),
        environments=config.runtime.environments,
    )
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
        error.during(f"the role {model.role} on pool {pool.name!r} ({pool.described()})")
        raise
    except DispatchError as error:
        raise PlanError(
            f"the role {model.role} can't be placed on pool {pool.name!r} ({pool.described()}): {error.message}",
            hint=error.hint,
        ) from error
    return mesh
