"""@register: declares, on an interface, which methods a worker group offers and how each is dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import attrs

from dovetail.dispatch.mesh import check_axis
from dovetail.errors import DispatchError

UNITS = ("sample", "pair", "group")
Unit = Literal["sample", "pair", "group"]
UNIT_COLUMNS = {"pair": "pair_id", "group": "group_id"}
"""Column whose equal values mark the samples of one unit (samples that stay together), by unit."""

_MARK = "__dovetail_dispatch__"

Function = TypeVar("Function", bound=Callable[..., Any])


@attrs.frozen
class ModeSpec:
    """Declaration of a dispatch mode: the name of a `dispatch_mode` plugin, and its options.

    `ModeSpec.of("ring", hops=2)` declares a plugin's own mode; the plugin is imported at the first call.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, **options: Any) -> ModeSpec:
        """Return the declaration of a mode with options."""
        return cls(name, tuple(sorted(options.items())))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options)})"


class Dispatch:
    """Core's dispatch modes that have no options."""

    ONE_TO_ALL: ClassVar[ModeSpec] = ModeSpec("one_to_all")
    """Calls every rank with the same arguments; returns a list of results in rank order, or None if all results are None."""
    ALL_TO_ALL: ClassVar[ModeSpec] = ModeSpec("all_to_all")
    """Takes every argument as a list with one element a rank; returns results as ONE_TO_ALL does."""
    RANK_ZERO: ClassVar[ModeSpec] = ModeSpec("rank_zero")
    """Calls only rank 0, and returns its result."""


def nd(mesh_name: str, split: tuple[str, ...] = ("dp",), unit: Unit = "sample") -> ModeSpec:
    """Return the dispatch mode that divides batches over some axes of the mesh and replicates them over the others.

    Args:
        mesh_name: name of the mesh that the worker group must have.
        split: axes that divide the batch.
        unit: what is never divided: a sample, a pair (equal `pair_id`, or neighbours without that column), or a group (equal `group_id`).
            An ObjectiveSpec among a call's arguments overrides the unit.

    Raises:
        DispatchError: an axis or the unit is unknown.
    """
    axes = tuple(check_axis(axis) for axis in split)
    if len(set(axes)) != len(axes):
        raise DispatchError(f"nd(split={split!r}) names an axis twice; name each axis once")
    if unit not in UNITS:
        raise DispatchError(
            f"nd(unit={unit!r}) names an unknown unit; expected one of {', '.join(UNITS)}"
        )
    return ModeSpec.of("nd", mesh=mesh_name, split=axes, unit=unit)


def register(dispatch_mode: ModeSpec) -> Callable[[Function], Function]:
    """Return a decorator that lets worker groups call a method, in this dispatch mode. Overrides inherit the mode.

    Stacks with `@abstractmethod`, in either order.
    """
    if not isinstance(dispatch_mode, ModeSpec):
        raise DispatchError(
            f"@register was given dispatch_mode={dispatch_mode!r}, which is not a dispatch mode",
            hint='use Dispatch.ONE_TO_ALL, nd("train") or ModeSpec.of("name", …)',
        )

    def mark(function: Function) -> Function:
        if not callable(function) or isinstance(function, type):
            raise DispatchError(f"@register can only decorate a method, not {function!r}")
        other = getattr(function, _MARK, None)
        if other not in {None, dispatch_mode}:
            raise DispatchError(
                f"{function.__qualname__} is registered twice, as {other} and as {dispatch_mode}; keep one"
            )
        setattr(function, _MARK, dispatch_mode)
        return function

    return mark


def registered_methods(worker_class: type) -> dict[str, ModeSpec]:
    """Return every registered method of a class, inherited ones included, with its dispatch mode.

    Raises:
        DispatchError: a method is registered in two modes.
    """
    found: dict[str, tuple[ModeSpec, type]] = {}
    for base in reversed(worker_class.__mro__):
        for name, value in vars(base).items():
            mode = getattr(value, _MARK, None)
            if mode is None:
                continue
            other, owner = found.setdefault(name, (mode, base))
            if other != mode:
                raise DispatchError(
                    f"{base.__qualname__}.{name} is registered as {mode}, but "
                    f"{owner.__qualname__}.{name} as {other}",
                    hint="leave @register off: an override inherits its interface's mode",
                )
    return {name: mode for name, (mode, _) in found.items()}
