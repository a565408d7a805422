"""Adapters in the plan: which layers of a model they are put on, and how many parameters they have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces.model_shape import ModelShape
from dovetail.planning.models import ModelRole, adapter_of
from dovetail.planning.plan import Plan
from dovetail.sections import RunConfig
from dovetail.sections.adapter import PlannedAdapter


@attrs.frozen(kw_only=True)
class AdapterPlan:
    """The low-rank adapters that one role trains (arXiv 2106.09685); everything else of its model is frozen."""

    role: str
    rank: int
    dora: bool
    """Whether magnitudes are trained too (arXiv 2402.09353)."""
    layers: tuple[str, ...]
    """Last parts of the names of the layers that they are on; empty where the config leaves them to the engine, or the
    model can't be read here."""
    count: int
    """How many layers those are."""
    parameters: int | None
    """Parameters of all adapters; None where the layers are not known."""
    of: int | None
    """Parameters of the model below them."""

    def __str__(self) -> str:
        kind = f"rank {self.rank}{' (DoRA)' if self.dora else ''}"
        if self.parameters is None or not self.of:
            return f"adapters of {self.role}: {kind}"
        where = f"{', '.join(self.layers)} ({self.count} layer{'' if self.count == 1 else 's'})"
        share = 100 * self.parameters / self.of
        return (
            f"adapters of {self.role}: {kind} on {where}, {self.parameters:,} parameters "
            f"({share:.2g}% of the model's {self.of:,})"
        )


def adapters_of(config: RunConfig, plan: Plan) -> Iterator[AdapterPlan]:
    """Yield the adapters of every role that trains some."""
    for role in plan.models:
        planned = planned_adapter(role)
        if planned is None or planned.rank is None:
            continue
        try:
            shape: ModelShape | None = shape_of(config, plan, role)
        except ModelError:
            shape = None
        names = adapted_layers(planned, shape) if shape is not None else ()
        yield AdapterPlan(
            role=role.role,
            rank=planned.rank,
            dora=planned.dora,
            layers=tuple(sorted({name.rpartition(".")[2] for name in names})),
            count=len(names),
            parameters=adapter_parameters(planned, shape) if shape and names else None,
            of=base_parameters(shape, role) if shape is not None else None,
        )


def shape_of(config: RunConfig, plan: Plan, role: ModelRole) -> ModelShape:
    """Return the shape of a role's model, as its engine reports it; for errors see `TrainEngine.shape`."""
    shape: ModelShape = plan.facts.engine(role.role).cls.shape(config.model_section(role.role))
    return shape


def planned_adapter(role: ModelRole) -> PlannedAdapter | None:
    """Return the adapter that a role trains, as its engine's config describes it; None where it trains all weights."""
    return adapter_of(role.engine.config) if role.moves else None


def adapted_layers(planned: PlannedAdapter, shape: ModelShape) -> tuple[str, ...]:
    """Return names of the layers that are adapted; empty where the config does not say."""
    named = {name for target in planned.target_modules for name in shape.matching(target)}
    return tuple(
        name
        for name, layer in shape.layers.items()
        if (name in named or (planned.all_linear and layer.linear))
        and not (planned.excluded and re.fullmatch(planned.excluded, name))
    )


def adapter_parameters(planned: PlannedAdapter, shape: ModelShape) -> int:
    """Return parameters of A [rank, in] and B [out, rank] of every adapted layer, and with DoRA of its magnitudes [out]."""
    rank = planned.rank or 0
    layers = [shape.layers[name] for name in adapted_layers(planned, shape)]
    return sum(
        rank * (layer.inputs + layer.outputs) + (layer.outputs if planned.dora else 0)
        for layer in layers
    )


def base_parameters(shape: ModelShape, role: ModelRole) -> int:
    """Return parameters of a role's model without adapters, and without a value head in place of the output layer."""
    return shape.parameters - (shape.head_parameters if role.head == "value" else 0)
