"""Adapters in the plan: the adapted layers of a model, and the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces.model_shape import ModelShape
from dovetail.planning.plan import Plan


@attrs.frozen(kw_only=True)
class AdapterPlan:
    """The low-rank adapters that one role trains (arXiv 2106.09685); the rest of the role's model is frozen."""

    role: str
    rank: int
    dora: bool
    """Whether DoRA's magnitudes are trained too (arXiv 2402.09353)."""
    layers: tuple[str, ...]
    """Last parts of the names of the adapted layers; empty if the config leaves the layers to the engine, or this machine
    can't read the model."""
    count: int
    """Number of adapted layers."""
    parameters: int | None
    """Number of parameters of all adapters; None if the layers are unknown."""
    of: int | None
    """Number of parameters of the model that the adapters are added to; None if this machine can't read the model."""

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


def adapters_of(plan: Plan) -> Iterator[AdapterPlan]:
    """Yield a description of the adapters of each role that trains adapters."""
    for role in plan.models:
        planned = role.adapter
        if planned is None or planned.rank is None:
            continue
        try:
            shape: ModelShape | None = plan.shape(role)
        except ModelError:
            shape = None
        names = shape.adapted_layers(planned) if shape is not None else ()
        yield AdapterPlan(
            role=role.role,
            rank=planned.rank,
            dora=planned.dora,
            layers=tuple(sorted({name.rpartition(".")[2] for name in names})),
            count=len(names),
            parameters=shape.adapter_parameters(planned) if shape and names else None,
            of=role.parameters(shape) if shape is not None else None,
        )
