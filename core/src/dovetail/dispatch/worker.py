"""Worker: base class of the workers of a group, with rank and mesh."""

from __future__ import annotations

from typing import Any

from dovetail.dispatch.mesh import Mesh
from dovetail.dispatch.registration import registered_methods
from dovetail.errors import DispatchError


class Worker:
    """One rank of a worker group.

    Combine it with a plugin: `class MyEngine(Worker, Plugin)`. It has no constructor of its own: the runtime puts rank and mesh into the
    plugin's context.
    """

    context: Any

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Check that no inherited method is registered in another mode."""
        super().__init_subclass__(**kwargs)
        registered_methods(cls)

    @property
    def rank(self) -> int:
        """This worker's rank in its group, from 0."""
        return int(self._context().rank)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the group; a mesh of one rank outside a group."""
        mesh = self._context().mesh
        return Mesh() if mesh is None else mesh

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinates of this worker's rank on every axis of the mesh."""
        return self.mesh.coordinates(self.rank)

    def _context(self) -> Any:
        context = getattr(self, "context", None)
        if context is None:
            raise DispatchError(
                f"{type(self).__qualname__} has no context, so its rank is unknown",
                hint="call super().__init__(config, context) in its constructor",
            )
        return context
