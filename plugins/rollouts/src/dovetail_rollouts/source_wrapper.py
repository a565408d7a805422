"""SourceWrapper: a source of experience around another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dovetail.errors import DovetailError
from dovetail.interfaces import (
    ON_REQUEST,
    ExperienceSource,
    Finding,
    Key,
    Measure,
    PlannedPart,
    PlanNote,
    Plugin,
    PluginConfig,
    PluginContext,
    RowVerdict,
    Selection,
    Site,
    SourceData,
    SourcePlacement,
    StepAsk,
    StepRows,
    Tokenizer,
)
from dovetail.plugins import load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection

if TYPE_CHECKING:
    from dovetail.batch import Batch
    from dovetail.interfaces import Experience, MemoryRules, PlanFacts, PluginRef, StepContext
    from dovetail.sections import Pool


class SourceWrapper(ExperienceSource):
    """Forwards every call to the source that it wraps. A subclass overrides some, such as `collect`; it sets `roles`, `on_request` and
    `follows` where it wraps another source than `rollouts`.

    Attributes:
        inner: the source that it wraps.
    """

    wraps: ClassVar[str] = "rollouts"
    """Name of the source that it wraps, which has no settings of its own."""
    roles = ("rollout",)
    on_request = frozenset(ON_REQUEST)

    def __init__(self, config: Any, context: PluginContext) -> None:
        super().__init__(config, context)
        ref = ref_for("source", PluginSection(name=self.wraps))
        self.inner = cast("ExperienceSource", make_plugin(ref, context))

    @classmethod
    def wrapped(cls) -> tuple[type[ExperienceSource], PluginSection]:
        """Return the class of the source that it wraps, and its config."""
        section = PluginSection(name=cls.wraps)
        return cast("Any", load_plugin_class(ref_for("source", section))), section

    @classmethod
    def selects(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, Selection]:
        inner, own = cls.wrapped()
        return {"source.wrapped": ("source", own), **inner.selects(own, facts)}

    @classmethod
    def rows(cls, config: PluginConfig, facts: PlanFacts) -> StepRows:
        inner, own = cls.wrapped()
        return inner.rows(own, facts)

    @classmethod
    def gives(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        inner, own = cls.wrapped()
        return inner.gives(own, facts)

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> tuple[str, str] | None:
        inner, own = cls.wrapped()
        return inner.lacks(own, facts, column)

    @classmethod
    def age(cls, config: PluginConfig, facts: PlanFacts) -> int:
        inner, own = cls.wrapped()
        return inner.age(own, facts)

    @classmethod
    def parts_of_step(cls, config: PluginConfig, facts: PlanFacts) -> Sequence[PlannedPart]:
        inner, own = cls.wrapped()
        return inner.parts_of_step(own, facts)

    @classmethod
    def publication(cls, config: PluginConfig, facts: PlanFacts) -> PlannedPart | None:
        inner, own = cls.wrapped()
        return inner.publication(own, facts)

    @classmethod
    def placed(
        cls, config: PluginConfig, facts: PlanFacts, pools: Mapping[str, Pool]
    ) -> SourcePlacement:
        inner, own = cls.wrapped()
        return inner.placed(own, facts, pools)

    @classmethod
    def memory(cls, config: PluginConfig, plan: Any) -> Mapping[str, Mapping[str, int]]:
        inner, own = cls.wrapped()
        return inner.memory(own, plan)

    @classmethod
    def memory_rules(cls, config: PluginConfig, plan: Any) -> Mapping[str, MemoryRules]:
        inner, own = cls.wrapped()
        return inner.memory_rules(own, plan)

    @classmethod
    def notes(cls, config: PluginConfig, plan: Any) -> Iterator[PlanNote]:
        inner, own = cls.wrapped()
        return inner.notes(own, plan)

    @classmethod
    def forecast(cls, config: PluginConfig, plan: Any, run: Path) -> PlanNote:
        inner, own = cls.wrapped()
        return inner.forecast(own, plan, run)

    @classmethod
    def read_tokenizer(cls, config: PluginConfig, facts: PlanFacts) -> Tokenizer:
        inner, own = cls.wrapped()
        return inner.read_tokenizer(own, facts)

    @classmethod
    def load(cls, config: PluginConfig, facts: PlanFacts, tokenizer: Tokenizer) -> SourceData:
        inner, own = cls.wrapped()
        return inner.load(own, facts, tokenizer)

    @classmethod
    def examine(
        cls,
        config: PluginConfig,
        facts: PlanFacts,
        data: Any,
        reward: Callable[..., Any] | None,
    ) -> Iterator[str | Finding | DovetailError]:
        inner, own = cls.wrapped()
        return inner.examine(own, facts, data, reward)

    @classmethod
    def named_by_rows(
        cls, config: PluginConfig, facts: PlanFacts, data: Any
    ) -> Sequence[PluginRef]:
        inner, own = cls.wrapped()
        return inner.named_by_rows(own, facts, data)

    @classmethod
    def verdicts(
        cls, config: PluginConfig, facts: PlanFacts, rows: Iterable[Any]
    ) -> Iterator[RowVerdict]:
        inner, own = cls.wrapped()
        return inner.verdicts(own, facts, rows)

    def launch(self, plan: Any, reward: Callable[..., Any] | None) -> None:
        self.inner.launch(plan, reward)

    def start(self) -> None:
        """Start the source that it wraps."""
        self.inner.start()

    def open(self, site: Site) -> None:
        self.inner.open(site)

    @property
    def parts(self) -> Mapping[str, Plugin]:
        """Those of the source that it wraps."""
        return self.inner.parts

    @property
    def observers(self) -> Mapping[str, object]:
        """Those of the source that it wraps."""
        return self.inner.observers

    @property
    def outstanding(self) -> int:
        """The number of groups that the wrapped source has admitted and no step has taken."""
        return self.inner.outstanding

    def admit(self, groups: int, ask: StepAsk) -> None:
        self.inner.admit(groups, ask)

    def collect(self, step: StepContext, ask: StepAsk) -> Experience:
        return self.inner.collect(step, ask)

    def settle(self, step: int, trained: Collection[Key], left_out: Mapping[Key, str]) -> None:
        self.inner.settle(step, trained, left_out)

    def give_back(self, step: int, *, sound: bool) -> None:
        self.inner.give_back(step, sound=sound)

    def publish(self) -> None:
        self.inner.publish()

    def rest(self) -> None:
        self.inner.rest()

    def validate(self, measure: Measure) -> dict[str, float]:
        return self.inner.validate(measure)

    def fixed(self) -> Sequence[Batch]:
        return self.inner.fixed()

    def summary(self) -> Mapping[str, Any]:
        return self.inner.summary()

    def state(self) -> Mapping[str, Any]:
        """Return the state of the wrapped source; a subclass adds its own: `{**super().state(), "kept": …}`."""
        return {"wrapped": self.inner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the source that it wraps."""
        self.inner.load_state(state["wrapped"])

    def close(self) -> None:
        """Close the source that it wraps."""
        self.inner.close()
