"""The list of a step's stages: which are active, in which order, and which version of each column every stage reads.

The experience source provides its columns before the first stage. A stage of the stage set is active if its `because` gives a reason. A
stage that the config names is always active, and replaces a stage of the set with the same name. An installed stage is active if it alone
declares a required column, and runs before the first stage that requires the column. As a stage's requirements may depend on those of
others, the search repeats until nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.batch.columns import glossary
from dovetail.errors import PlanError, nearest
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import Phase, PlanFacts, SelectedPlugin
from dovetail.planning.stage_order import IN_CONFIG, Candidate, in_order, ordered, phase_of, whose
from dovetail.plugins.index import default_index
from dovetail.sections import FollowSection, PluginSection, RunConfig

if TYPE_CHECKING:
    from dovetail.plugins.entry import PluginEntry


@attrs.frozen(kw_only=True)
class PlannedStage:
    """One stage of a step, as it will run."""

    name: str
    phase: Phase
    ref: PluginRef
    roles: tuple[str, ...]
    """Roles whose models the stage uses."""
    who: str
    """Where the stage runs, for display: its roles with their engines, or `controller`; for a stage outside the stage set, followed by its
    distribution or file.
    """
    because: str
    reads: Mapping[str, int]
    """Required columns and the version of each: 1 as first written, 1 more after each rewrite."""
    provides: frozenset[str]
    rewrites: frozenset[str]
    of_set: bool
    """Whether the stage belongs to the stage set (`algorithm.stage_set`). Results of other stages are checked more closely."""
    objectives: Mapping[str, ObjectiveSpec] = attrs.field(factory=dict)
    """Objective of each role that the stage trains."""
    follows: Mapping[str, FollowSection] = attrs.field(factory=dict)
    """For each role whose model the stage moves towards the actor: the rule by which it does so."""


def list_stages(
    config: RunConfig, plugins: Mapping[str, SelectedPlugin], updates_per_step: int
) -> tuple[PlanFacts, tuple[PlannedStage, ...]]:
    """Return the facts of the plan, and the stages of a step in order.

    Args:
        config: the whole config.
        plugins: every plugin that the config selects, by key path.
        updates_per_step: optimizer steps of the actor after each rollout.

    Raises:
        PlanError: a column has no provider or several, is read before it is written, or is rewritten in no declared order; or `before`
            and `after` of the stages contradict each other.
    """
    stage_set = plugins["algorithm.stage_set"]
    facts = PlanFacts(config=config, plugins=plugins, updates_per_step=updates_per_step)
    candidates = _candidates(facts)
    run_by_stages = stage_set.cls.run_by_stages(stage_set.config, facts)
    required = _required_by_plugins(plugins, run_by_stages)
    while True:
        facts = attrs.evolve(facts, required=required)
        active = [candidate for candidate in candidates if candidate.because(facts)]
        found = dict(required)
        for candidate in active:
            for column, reader in candidate.requires(facts).items():
                found.setdefault(column, reader)
        installed = list(_installed_providers(facts, found, active))
        if found.keys() == required.keys() and not installed:
            break
        required = found
        for provider in installed:
            candidates.insert(_before_readers(provider, candidates, facts), provider)
    stages = tuple(_checked(facts, in_order(active)))
    stage_set.cls.check(stage_set.config, facts, stages)
    return facts, stages


def _names_of_set(facts: PlanFacts) -> dict[str, str]:
    """Return the stages of the set: plain name → the name in the set, which may include a distribution (`name@distribution`)."""
    names = facts.plugins["algorithm.stage_set"].cls.stages
    return {name.partition("@")[0]: name for name in names}


def _candidates(facts: PlanFacts) -> list[Candidate]:
    """Return the stages of the set, then the other stages that the config names.

    A stage of the config that has the name of a stage of the set replaces that stage, in the same position.

    Raises:
        PlanError: the config names two stages of one name, or a stage that the set has already.
    """
    candidates = {
        name: Candidate(_with_defaults(whole)) for name, whole in _names_of_set(facts).items()
    }
    for path, plugin in facts.plugins.items():
        if not path.startswith(IN_CONFIG):
            continue
        name = str(plugin.cls.name)
        other = candidates.get(name)
        if other is None:
            candidates[name] = Candidate(plugin, path)
        elif other.in_config:
            raise PlanError(
                f"two stages are named {name!r}: {whose(other)} and {whose(Candidate(plugin))}",
                hint=f"remove {path}, or give its class another name",
            )
        elif other.plugin.cls is plugin.cls:
            raise PlanError(
                f"{path} names {whose(other)}, a stage that is added automatically when a plugin requires its columns",
                hint=f"remove {path}",
            )
        else:
            candidates[name] = Candidate(plugin, f"{path}, in place of the stage set's")
    return list(candidates.values())


def _required_by_plugins(
    plugins: Mapping[str, SelectedPlugin], run_by_stages: Collection[str]
) -> dict[str, str]:
    """Return the columns that plugins require, each with the title of a plugin that requires it.

    Omitted are objectives and the plugins at the key paths `run_by_stages`: the stage that runs such a plugin requires its columns.
    """
    required: dict[str, str] = {}
    for path, plugin in plugins.items():
        if plugin.ref.kind != "objective" and path not in run_by_stages:
            for column in sorted(plugin.requires()):
                required.setdefault(column, plugin.title)
    return required


def _installed_providers(
    facts: PlanFacts, required: Mapping[str, str], active: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield installed stages, with default settings, for required columns that nothing active provides and that only this stage declares."""
    there = source_columns(facts).union(*(stage.provides(facts) for stage in active))
    names = {stage.name for stage in active}
    for column in sorted(required.keys() - there - glossary().keys()):
        offers = [entry for entry in _declaring(column) if entry.name not in names]
        if len(offers) == 1:
            plugin = _with_defaults(offers[0].name)
            names.add(plugin.ref.name)
            yield Candidate(plugin, f"{column} required by {required[column]}")


def _with_defaults(name: str) -> SelectedPlugin:
    """Load an installed stage with the defaults of its Config."""
    from dovetail.plugins.load import load_plugin_class, ref_for

    cls: Any = load_plugin_class(ref_for("stage", PluginSection(name=name)))
    section = cls.Config(name=name)
    ref = ref_for("stage", section)
    return SelectedPlugin(f"stages.{ref.name}", ref, cls, section)


def _declaring(column: str) -> list[PluginEntry]:
    """Return the installed stages that declare a column."""
    return [
        entry
        for entry in default_index().entries("stage")
        if entry.usable
        and entry.manifest is not None
        and column in {declared["name"] for declared in entry.manifest.columns}
    ]


def _before_readers(provider: Candidate, candidates: Sequence[Candidate], facts: PlanFacts) -> int:
    """Return the index of the first stage that requires a column of `provider`: the provider is inserted there."""
    columns = {column.name for column in provider.plugin.cls.columns}
    places = (
        place
        for place, other in enumerate(candidates)
        if other.because(facts) and columns & other.requires(facts).keys()
    )
    return next(places, len(candidates))


def _checked(facts: PlanFacts, stages: Sequence[Candidate]) -> Iterator[PlannedStage]:
    """Yield every stage with the version of each column that it reads.

    Raises:
        PlanError: a column is missing or has two providers, two rewrites have no declared order, or a stage of the phase `check` writes a
            column.
    """
    columns = _Columns(facts, stages)
    for stage in stages:
        requires = stage.requires(facts)
        provides, rewrites = stage.provides(facts), stage.rewrites(facts)
        if stage.plugin.cls.phase == "check" and (provides or rewrites):
            raise PlanError(
                f"{whose(stage)} has the phase 'check' and writes {', '.join(sorted(provides | rewrites))}; a stage of this phase must not write columns",
                hint="give the stage the phase 'transform'",
            )
        reads = {column: columns.read(column, requires[column], stage) for column in requires}
        for column in sorted(rewrites):
            columns.rewrite(column, stage)
        for column in sorted(provides):
            columns.provide(column, stage)
        yield _planned(facts, stage, reads, provides, rewrites)
    for column, reader in facts.required.items():
        columns.read(column, reader, None)


class _Columns:
    """The version and provider of each column of a step, recorded stage by stage in the order of the stages."""

    def __init__(self, facts: PlanFacts, stages: Sequence[Candidate]) -> None:
        self._facts, self._stages = facts, stages
        self._known = glossary(
            column
            for plugin in (*facts.plugins.values(), *(stage.plugin for stage in stages))
            for column in plugin.cls.columns
        )
        self._versions = dict.fromkeys(source_columns(facts), 1)
        self._providers = dict.fromkeys(self._versions, facts.plugins["source"].title)
        self._rewriters: dict[str, list[Candidate]] = {}

    def read(self, column: str, reader: str, stage: Candidate | None) -> int:
        """Return a column's current version.

        Raises:
            PlanError: no earlier stage has written the column.
        """
        if column not in self._versions:
            raise _no_provider(self._facts, column, reader, stage, self._stages, self._known)
        return self._versions[column]

    def provide(self, column: str, stage: Candidate) -> None:
        """Record that a stage writes a new column.

        Raises:
            PlanError: the column has a provider already, or no plugin declares it.
        """
        if column in self._providers:
            raise PlanError(
                f"the column {column!r} has two providers: {self._providers[column]} and {whose(stage)}",
                hint=f"remove one of the two, or let the one that runs later declare {column!r} in `rewrites`, not in `provides`",
            )
        if column not in self._known:
            raise _undeclared(stage, column, self._known)
        self._versions[column], self._providers[column] = 1, whose(stage)

    def rewrite(self, column: str, stage: Candidate) -> None:
        """Record that a stage rewrites a column.

        Raises:
            PlanError: no earlier stage has written the column, or another stage rewrites it in the same phase in no declared order.
        """
        self.read(column, f"{stage.title}, to rewrite it,", stage)
        for other in self._rewriters.setdefault(column, []):
            if phase_of(other) == phase_of(stage) and not ordered(other, stage):
                raise PlanError(
                    f"{whose(other)} and {whose(stage)} both rewrite {column!r} in the phase {stage.plugin.cls.phase!r}, "
                    "but neither declares which runs first",
                    hint=f"name {other.name!r} in `after` or `before` of stage {stage.name!r}",
                )
        self._rewriters[column].append(stage)
        self._versions[column] += 1


def _planned(
    facts: PlanFacts,
    stage: Candidate,
    reads: Mapping[str, int],
    provides: frozenset[str],
    rewrites: frozenset[str],
) -> PlannedStage:
    plugin = stage.plugin
    roles = stage.roles(facts)
    who = ", ".join(f"{role} ({facts.engine(role).ref.name})" for role in roles) or "controller"
    if not stage.of_set:
        who += f"; {plugin.ref.distribution or plugin.ref.path}"
    return PlannedStage(
        name=stage.name,
        phase=plugin.cls.phase,
        ref=plugin.ref,
        roles=roles,
        who=who,
        because=str(stage.because(facts)),
        reads=reads,
        provides=provides,
        rewrites=rewrites,
        of_set=stage.of_set,
        objectives=plugin.cls.objectives(plugin.config, facts),
        follows=plugin.cls.follows(plugin.config, facts),
    )


def _undeclared(stage: Candidate, column: str, known: Iterable[str]) -> PlanError:
    near = nearest(column, known)
    return PlanError(
        f"{whose(stage)} provides the column {column!r}, which no plugin declares",
        hint="declare it in the class attribute `columns`, with its dtype and shape"
        + (f". If the stage's author meant the column {near!r}, correct the stage" if near else ""),
    )


def _no_provider(
    facts: PlanFacts,
    column: str,
    reader: str,
    stage: Candidate | None,
    stages: Sequence[Candidate],
    known: Mapping[str, Any],
) -> PlanError:
    later = [other for other in stages if column in other.provides(facts)]
    if later and stage is not None:
        fix = f"name {later[0].name!r} in `after` of stage {stage.name!r}"
        if later[0].in_config and stage.in_config:
            fix = f"place {later[0].name!r} before {stage.name!r} in algorithm.stages"
        if phase_of(later[0]) != phase_of(stage):
            fix = (
                f"give stage {stage.name!r} the phase {later[0].plugin.cls.phase!r} or a later one"
            )
        return PlanError(
            f"{reader} requires the column {column!r}, but {whose(later[0])}, which writes it, runs after {whose(stage)}",
            hint=fix,
        )
    if column not in known and (installed := _declaring(column)):
        titles = ", ".join(entry.title for entry in installed)
        return PlanError(
            f"{reader} requires the column {column!r}, which no stage of the step provides; installed stages that declare the column: {titles}",
            hint="add one of these stages to algorithm.stages, with settings that make it write the column",
        )
    if column not in known:
        near = nearest(column, known)
        return PlanError(
            f"{reader} requires the column {column!r}, which no plugin declares",
            hint=f"if the plugin's author meant the column {near!r}, correct the plugin"
            if near
            else None,
        )
    instead = [
        other
        for other in stages
        if other.in_config
        and (whole := _names_of_set(facts).get(other.name)) is not None
        and column in Candidate(_with_defaults(whole)).provides(facts)
    ]
    why, fix = _why_not(facts, column, known[column].owner)
    if instead:
        why = f"{whose(instead[0])}, which replaces the stage set's stage of that name, does not provide it"
    return PlanError(
        f"{reader} requires the column {column!r} ({known[column].meaning}), but {why}", hint=fix
    )


def _why_not(facts: PlanFacts, column: str, owner: str) -> tuple[str, str]:
    """Return why nothing provides a declared column, and the fix. `owner` names what normally writes the column."""
    source = facts.plugins["source"]
    lacks: tuple[str, str] | None = source.cls.lacks(source.config, facts, column)
    if lacks is not None:
        return lacks
    stage_set = facts.plugins["algorithm.stage_set"]
    why = stage_set.cls.lacks(stage_set.config, facts, column)
    return (
        why or f"nothing that this config selects provides it (it is written by: {owner})",
        "choose another plugin that provides the column, or one that does not require it",
    )


def source_columns(facts: PlanFacts) -> frozenset[str]:
    """Return the columns that the experience source provides before the first stage."""
    source = facts.plugins["source"]
    columns: frozenset[str] = source.cls.gives(source.config, facts)
    return columns
