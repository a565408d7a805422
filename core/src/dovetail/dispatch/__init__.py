"""One method call, many workers: meshes, dispatch modes, worker groups, futures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.dispatch.future import Future
from dovetail.dispatch.mesh import Mesh

# Bound here and now: loaded later, the module `register` would take the function's place.
from dovetail.dispatch.register import Dispatch, ModeSpec, nd, register, registered_methods
from dovetail.dispatch.worker import Worker

if TYPE_CHECKING:
    from dovetail.dispatch.group import WorkerGroup

__all__ = [
    "Dispatch",
    "Future",
    "Mesh",
    "ModeSpec",
    "Worker",
    "WorkerGroup",
    "nd",
    "register",
    "registered_methods",
]


def __getattr__(name: str) -> object:
    # The group needs the modes and they need NumPy; the interfaces, which only declare, do not.
    if name == "WorkerGroup":
        from dovetail.dispatch.group import WorkerGroup

        return WorkerGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
