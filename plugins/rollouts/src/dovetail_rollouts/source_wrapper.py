"""SourceWrapper: a source of experience that wraps another source."""

from __future__ import annotations

from abc import update_abstractmethods
from collections.abc import Mapping
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dovetail.interfaces import (
    ON_REQUEST,
    ExperienceSource,
    PluginConfig,
    PluginContext,
    Selection,
)
from dovetail.plugins import load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection

if TYPE_CHECKING:
    from dovetail.interfaces import PlanFacts


def _passed_on(name: str, member: Any) -> Any:
    """Return a method or property that forwards to the wrapped source's member `name`; a classmethod forwards to the source's class."""
    if isinstance(member, property):
        return property(lambda self: getattr(self.inner, name), doc=member.__doc__)
    if isinstance(member, classmethod):

        @wraps(member.__func__, updated=())  # does not copy the mark of abstract methods
        def planned(cls: Any, _config: PluginConfig, *given: Any, **named: Any) -> Any:
            inner, own = cls.wrapped()
            return getattr(inner, name)(own, *given, **named)

        return classmethod(planned)

    @wraps(member, updated=())
    def asked(self: Any, *given: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*given, **named)

    return asked


def _passing_on(cls: type[SourceWrapper]) -> type[SourceWrapper]:
    """Give the class a forwarding method or property for every public member of `ExperienceSource` that the class does not define."""
    for base in ExperienceSource.__mro__:
        for name, member in vars(base).items():
            if name.startswith("_") or name in vars(cls):
                continue
            if isinstance(member, (FunctionType, classmethod, property)):
                setattr(cls, name, _passed_on(name, member))
    return update_abstractmethods(cls)


@_passing_on
class SourceWrapper(ExperienceSource):
    """Forwards every call to the wrapped source of experience.

    A subclass overrides some methods, such as `collect`. A subclass that wraps another source than `rollouts` also sets `wraps`, and
    copies the values of `roles`, `on_request` and `follows` from the class of that source.

    Attributes:
        inner: the wrapped source.
    """

    wraps: ClassVar[str] = "rollouts"
    """Name of the wrapped source, which is constructed with the defaults of its settings."""
    roles = ("rollout",)
    on_request = frozenset(ON_REQUEST)

    def __init__(self, config: Any, context: PluginContext) -> None:
        super().__init__(config, context)
        ref = ref_for("source", PluginSection(name=self.wraps))
        self.inner = cast("ExperienceSource", make_plugin(ref, context))

    @classmethod
    def wrapped(cls) -> tuple[type[ExperienceSource], PluginSection]:
        """Return the class of the wrapped source, and its config."""
        section = PluginSection(name=cls.wraps)
        return cast("Any", load_plugin_class(ref_for("source", section))), section

    @classmethod
    def selects(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, Selection]:
        inner, own = cls.wrapped()
        return {"source.wrapped": ("source", own), **inner.selects(own, facts)}

    def state(self) -> Mapping[str, Any]:
        """Return the state of the wrapped source; a subclass adds its own state: `{**super().state(), "kept": …}`."""
        return {"wrapped": self.inner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the wrapped source."""
        self.inner.load_state(state["wrapped"])
