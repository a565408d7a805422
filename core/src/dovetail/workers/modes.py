"""The dispatch modes that core ships: one_to_all, all_to_all, rank_zero, and nd over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from dovetail.batch.batch import Batch
from dovetail.config.builtin import NdConfig
from dovetail.dispatch.mesh import Mesh
from dovetail.dispatch.registration import ModeSpec
from dovetail.errors import DispatchError
from dovetail.interfaces.dispatch_mode import Call, DispatchMode
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import PluginContext
from dovetail.workers.collect import collect
from dovetail.workers.division import Division, divide


class OneToAll(DispatchMode):
    """The same arguments to every rank; a list of the results in rank order, None where all are None."""

    name = "one_to_all"
    api = ">=1.0,<2"

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        return [(args, kwargs)] * mesh.size, None

    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Any) -> Any:
        return None if all(result is None for result in results) else list(results)


class AllToAll(OneToAll):
    """Every argument is a list with one element a rank; results as in one_to_all."""

    name = "all_to_all"

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        for name, value in [*enumerate(args), *kwargs.items()]:
            if not isinstance(value, list | tuple) or len(value) != mesh.size:
                found = len(value) if isinstance(value, list | tuple) else type(value).__name__
                raise DispatchError(
                    f"argument {name!r} must be a list with one element for each of the "
                    f"{mesh.size} ranks, not {found}",
                    hint="all_to_all hands element i of every argument to rank i",
                )
        return [
            (tuple(value[rank] for value in args), {k: v[rank] for k, v in kwargs.items()})
            for rank in range(mesh.size)
        ], None


class RankZero(DispatchMode):
    """Only rank 0 is called; its result."""

    name = "rank_zero"
    api = ">=1.0,<2"

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        return [(args, kwargs), *[None] * (mesh.size - 1)], None

    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Any) -> Any:
        return results[0]


class Nd(DispatchMode):
    """Batches are divided over the split axes and replicated over the others.

    Every Batch among the arguments is divided alike: by the first one's token counts, with units whole, which an
    ObjectiveSpec among the arguments names. Other arguments go to every rank. The result of a part comes from the rank with coordinate 0 on the axes that
    replicate, but the last pipeline stage. Batches come back joined in the caller's order (see `collect.py`).

    With fewer units than parts, ranks without samples would miss the collectives of the others. They get a
    masked copy of the lightest unit, marked True in the column `padding`, and their results are dropped.
    """

    name = "nd"
    api = ">=1.0,<2"
    Config = NdConfig

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Division]:
        if mesh.name != self.config.mesh:
            raise DispatchError(
                f"the method is dispatched over the mesh {self.config.mesh!r}, but its group has {mesh}",
                hint=f"make the group with Mesh(…, name={self.config.mesh!r})",
            )
        batches = _batches(args, kwargs)
        parts = len(self._sources(mesh))
        specs = (value for value in (*args, *kwargs.values()) if isinstance(value, ObjectiveSpec))
        unit = next((spec.unit for spec in specs), self.config.unit)
        division = divide(batches[0], parts, unit)

        def shares(value: object) -> list[Any]:
            return division.shares(value) if isinstance(value, Batch) else [value] * parts

        args_K = [shares(value) for value in args]
        kwargs_K = {name: shares(value) for name, value in kwargs.items()}
        return [
            (tuple(arg[k] for arg in args_K), {name: arg[k] for name, arg in kwargs_K.items()})
            for k in (self._part(mesh, rank) for rank in range(mesh.size))
        ], division

    def answering(self, mesh: Mesh) -> frozenset[int]:
        return frozenset(self._sources(mesh))

    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Division) -> Any:
        return collect([results[rank] for rank in self._sources(mesh)], receipt)

    def _part(self, mesh: Mesh, rank: int) -> int:
        """The part that a rank works on: its place among the split axes, the last of them fastest."""
        coordinates, part = mesh.coordinates(rank), 0
        for axis in self.config.split:
            part = part * mesh.axis_size(axis) + coordinates[axis]
        return part

    def _sources(self, mesh: Mesh) -> list[int]:
        """For each part, the rank that holds its result."""
        sources = {}
        for rank in range(mesh.size):
            where = mesh.coordinates(rank)
            replicated = {axis: at for axis, at in where.items() if axis not in self.config.split}
            holder = {axis: mesh.axis_size(axis) - 1 if axis == "pp" else 0 for axis in replicated}
            if replicated == holder:
                sources[self._part(mesh, rank)] = rank
        return [sources[part] for part in range(len(sources))]


BUILTIN: dict[str, type[DispatchMode]] = {
    mode.name: mode for mode in (OneToAll, AllToAll, RankZero, Nd)
}


@lru_cache(maxsize=256)
def resolve_mode(spec: ModeSpec) -> DispatchMode:
    """Return the mode that a declaration names: core's own, or a plugin's through the index.

    Raises:
        PluginError: no usable plugin of kind `dispatch_mode` has that name.
    """
    options = dict(spec.options)
    if spec.name in BUILTIN:
        mode = BUILTIN[spec.name]
        return mode(mode.Config(name=spec.name, **options), PluginContext())
    from dovetail.plugins import load

    config = load.config_class("dispatch_mode", {"name": spec.name})(name=spec.name, **options)
    plugin = load.make_plugin(load.ref_for("dispatch_mode", config), PluginContext())
    if not isinstance(plugin, DispatchMode):
        raise DispatchError(f"{plugin.name!r} is no DispatchMode but a {type(plugin).__qualname__}")
    return plugin


def _batches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Batch]:
    named = [*enumerate(args), *kwargs.items()]
    batches = [(name, value) for name, value in named if isinstance(value, Batch)]
    if not batches:
        raise DispatchError(
            "a method dispatched by nd needs a Batch among its arguments, but got "
            + (", ".join(type(value).__name__ for _, value in named) or "none"),
            hint="a method without batches is registered with Dispatch.ONE_TO_ALL",
        )
    first, count = batches[0][0], len(batches[0][1])
    for name, batch in batches[1:]:
        if len(batch) != count:
            raise DispatchError(
                f"batches of one call must have the same samples: argument {first!r} has {count}, "
                f"argument {name!r} has {len(batch)}"
            )
    return [batch for _, batch in batches]
