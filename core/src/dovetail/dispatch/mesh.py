"""Mesh: the ranks of a worker group on named axes. In names, `axis` is an axis of the mesh and `dim` a dimension of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from dovetail.errors import DispatchError, nearest

AXES = ("dp", "tp", "pp", "cp", "ep")
"""Names of the axes: data, tensor, pipeline, context and expert parallelism."""


class Mesh:
    """Ranks 0 … size − 1, laid out over named axes.

    The order of the axes fixes the order of ranks: neighbours along the last axis are consecutive ranks. Omitted axes have size 1.

    Attributes:
        name: the name of the mesh, by which dispatch modes refer to the mesh: `nd(mesh_name)`.
        axes: size of every axis, the outermost first.
    """

    __slots__ = ("_axes", "name")

    def __init__(
        self, axes: Mapping[str, int] | None = None, /, *, name: str = "train", **sizes: int
    ) -> None:
        """Lay out a mesh: `Mesh(dp=2, tp=4)`, or `Mesh({"dp": 2, "tp": 4})`.

        Raises:
            DispatchError: an axis is unknown or given twice, or a size is not an integer ≥ 1.
        """
        twice = set(axes or {}) & set(sizes)
        if twice:
            raise DispatchError(f"mesh axis {min(twice)!r} is given twice; give each axis once")
        given = {**(axes or {}), **sizes}
        for axis, size in given.items():
            check_axis(axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise DispatchError(f"mesh axis {axis!r} must be an integer ≥ 1, not {size!r}")
        self.name = name
        self._axes = given | {axis: 1 for axis in AXES if axis not in given}

    @classmethod
    def over(cls, workers: int, /, *, name: str = "train", **sizes: int) -> Mesh:
        """Return a mesh over `workers` ranks; dp, the outermost axis, gets the ranks that the other axes leave.

        Raises:
            DispatchError: the sizes do not multiply out to the number of workers.
        """
        if "dp" in sizes:
            mesh = cls(name=name, **sizes)
            return mesh.check_size(workers)
        inner = cls(name=name, **sizes)
        if workers < 1 or workers % inner.size:
            raise DispatchError(
                f"{workers} workers can't be divided into groups of {inner.size} ({inner.described()}): "
                f"{workers} / {inner.size} leaves {workers % inner.size}",
                hint=f"use a multiple of {inner.size} workers, or other axis sizes",
            )
        return cls({"dp": workers // inner.size, **sizes}, name=name)

    def check_size(self, workers: int) -> Mesh:
        """Check that the mesh has exactly this many ranks, and return the mesh.

        Raises:
            DispatchError: the mesh has another number of ranks.
        """
        if self.size != workers:
            raise DispatchError(
                f"the size of mesh {self.described()} is {self.size}; expected {workers}, the number of workers",
                hint=f"start {self.size} workers, or change an axis so that the product is {workers}",
            )
        return self

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis, by name, the outermost first: neighbours along the last axis are consecutive ranks."""
        return dict(self._axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self._axes.values())

    def axis_size(self, axis: str) -> int:
        """Return how many ranks an axis has."""
        return self._axes[check_axis(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis."""
        if not 0 <= rank < self.size:
            raise DispatchError(
                f"rank {rank} is not in the mesh {self}: ranks are 0 … {self.size - 1}"
            )
        coordinates = {}
        for axis in reversed(self._axes):
            rank, coordinates[axis] = divmod(rank, self._axes[axis])
        return {axis: coordinates[axis] for axis in self._axes}

    def rank(self, coordinates: Mapping[str, int] | None = None, /, **further: int) -> int:
        """Return the rank at these coordinates; omitted axes have coordinate 0."""
        where = {**(coordinates or {}), **further}
        for axis, coordinate in where.items():
            if not 0 <= coordinate < self.axis_size(axis):
                raise DispatchError(
                    f"coordinate {axis}={coordinate} is outside the mesh {self}: "
                    f"{axis} goes from 0 to {self._axes[axis] - 1}"
                )
        rank = 0
        for axis, size in self._axes.items():
            rank = rank * size + where.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the communication groups over these axes: lists of ranks, in rank order, that have equal coordinates on all other axes."""
        for axis in axes:
            check_axis(axis)
        others = [axis for axis in self._axes if axis not in axes]
        inner = [axis for axis in self._axes if axis in axes]
        return [
            [self.rank(fixed | moving) for moving in self._positions(inner)]
            for fixed in self._positions(others)
        ]

    def described(self) -> str:
        """Return the axes larger than 1 as text, such as `dp=2 × tp=4`; `dp=1` if there are none."""
        large = [f"{axis}={size}" for axis, size in self._axes.items() if size > 1]
        return " × ".join(large) or "dp=1"

    def _positions(self, axes: list[str]) -> list[dict[str, int]]:
        ranges = [range(self._axes[axis]) for axis in axes]
        return [dict(zip(axes, place, strict=True)) for place in product(*ranges)]

    def __repr__(self) -> str:
        return f"Mesh({self.described()}, name={self.name!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self.name == other.name and list(self._axes.items()) == list(other._axes.items())

    def __hash__(self) -> int:
        return hash((self.name, tuple(self._axes.items())))


def check_axis(axis: str) -> str:
    """Check that an axis of this name exists, and return the name.

    Raises:
        DispatchError: there is no such axis; the error names the nearest.
    """
    if axis not in AXES:
        near = nearest(axis, AXES)
        raise DispatchError(
            f"a mesh has no axis {axis!r}; its axes are {', '.join(AXES)}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return axis
