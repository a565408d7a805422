"""DispatchMode: how a call on a worker group is split over its workers, and how results come back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from dovetail.dispatch.mesh import Mesh
from dovetail.interfaces.plugin import Plugin

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one worker's call."""


class DispatchMode(Plugin):
    """Splits the arguments of one call into one call for each rank, and collects the ranks' results."""

    @abstractmethod
    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        """Return the ranks' calls, and a value that `collect` gets as `receipt`.

        The calls are in rank order, with None for ranks that are not called.
        """

    def answering(self, mesh: Mesh) -> frozenset[int]:
        """Return the ranks whose results `collect` reads; the results of other ranks may be None."""
        return frozenset(range(mesh.size))

    @abstractmethod
    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Any) -> Any:
        """Combine the ranks' results, given in rank order, into one result in the order of the caller's arguments.

        The result of a rank may be None if the rank was not called or is not in `answering`.
        """
