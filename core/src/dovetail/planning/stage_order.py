"""Candidate stages and their order: by phase, and within a phase as given, unless `before` and `after` demand another order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from dovetail.errors import PlanError, nearest
from dovetail.interfaces.stage import PHASES, PlanFacts, SelectedPlugin
from dovetail.plugins.titles import called

IN_CONFIG = "algorithm.stages["
"""Prefix of the key paths of stages that the config names."""


@attrs.frozen
class Candidate:
    """A stage that becomes part of the step if `because` gives a reason."""

    plugin: SelectedPlugin
    chosen_because: str | None = None
    """Reason why the stage is in the step even if its `because` gives none; None for a stage of the stage set."""

    @property
    def name(self) -> str:
        return str(self.plugin.cls.name)

    @property
    def title(self) -> str:
        return f"stage {self.name!r} ({self.plugin.path})"

    @property
    def in_config(self) -> bool:
        """Whether the config names the stage."""
        return self.plugin.path.startswith(IN_CONFIG)

    @property
    def of_set(self) -> bool:
        """Whether the stage belongs to the stage set (`algorithm.stage_set`), and does not replace a stage of the set."""
        return self.chosen_because is None

    def because(self, facts: PlanFacts) -> str | None:
        reason: str | None = self._answer("because", facts)
        return reason or self.chosen_because

    def requires(self, facts: PlanFacts) -> dict[str, str]:
        """Return the columns that the stage requires, each with the title of its reader: the stage, or a plugin that the stage runs."""
        found = self._names("requires", facts)
        if isinstance(found, Mapping):
            return dict(found)
        return dict.fromkeys(sorted(found), self.title)

    def provides(self, facts: PlanFacts) -> frozenset[str]:
        return frozenset(self._names("provides", facts))

    def rewrites(self, facts: PlanFacts) -> frozenset[str]:
        return frozenset(self._names("rewrites", facts))

    def roles(self, facts: PlanFacts) -> tuple[str, ...]:
        """Return the roles whose models the stage uses.

        Raises:
            PlanError: the config lacks one of these roles.
        """
        roles, known = tuple(self._names("roles", facts)), facts.config.role_sections
        for role in roles:
            if role not in known:
                near = nearest(role, known)
                raise PlanError(
                    f"{whose(self)} needs the role {role!r}, but the config has only {', '.join(known)}",
                    hint=f"set roles.{role}.path=MODEL"
                    + (
                        f". If the stage's author meant the role {near!r}, correct the stage"
                        if near
                        else ""
                    ),
                )
        return roles

    def _names(self, method: str, facts: PlanFacts) -> Collection[str]:
        """Call a class method of the stage by name, such as `roles`, and return the names (of columns or roles) that it returns.

        Raises:
            PlanError: the method returns anything but a collection of names.
        """
        found = self._answer(method, facts)
        if (
            isinstance(found, str)
            or not isinstance(found, Collection)
            or any(not isinstance(name, str) for name in found)
        ):
            example = f"{{{found!r}}}" if isinstance(found, str) else "frozenset()"
            raise PlanError(
                f"`{method}` of {whose(self)} returned {found!r}; expected a set of names",
                hint=f"return {example}",
            )
        return found

    def _answer(self, method: str, facts: PlanFacts) -> Any:
        bound = getattr(self.plugin.cls, method)
        return called(lambda: f"`{method}` of {whose(self)}", bound, self.plugin.config, facts)


def in_order(stages: Sequence[Candidate]) -> list[Candidate]:
    """Return the stages by phase, and within a phase as given, as far as `before` and `after` allow.

    Raises:
        PlanError: `before` and `after` contradict each other or the phases.
    """
    earlier = {stage.name: set(stage.plugin.cls.after) for stage in stages}
    for stage in stages:
        for name in stage.plugin.cls.before:
            if name in earlier:
                earlier[name].add(stage.name)
    by_name = {stage.name: stage for stage in stages}
    for stage in stages:
        for name in earlier[stage.name] & by_name.keys():
            if phase_of(by_name[name]) > phase_of(stage):
                raise PlanError(
                    f"{whose(by_name[name])} can't run before {whose(stage)}: its phase {by_name[name].plugin.cls.phase!r} "
                    f"comes after {stage.plugin.cls.phase!r}",
                    hint="correct `before` and `after` of the stages: they only order stages of one phase",
                )
    return [stage for phase in range(len(PHASES)) for stage in _sorted(stages, phase, earlier)]


def _sorted(
    stages: Sequence[Candidate], phase: int, earlier: Mapping[str, set[str]]
) -> list[Candidate]:
    waiting = [stage for stage in stages if phase_of(stage) == phase]
    done: list[Candidate] = []
    while waiting:
        names = {stage.name for stage in waiting}
        ready = [stage for stage in waiting if not earlier[stage.name] & (names - {stage.name})]
        if not ready:
            raise PlanError(
                f"`before` and `after` of {' and '.join(map(whose, waiting))} contradict each other: each of these stages "
                "would have to run before another of them",
                hint="correct `before` or `after` of one of these stages",
            )
        done.append(ready[0])
        waiting.remove(ready[0])
    return done


def phase_of(stage: Candidate) -> int:
    """Return the position of a stage's phase among the phases of a step."""
    return PHASES.index(stage.plugin.cls.phase)


def ordered(one: Candidate, other: Candidate) -> bool:
    """Return whether either of two stages names the other in `before` or `after`."""
    return any(
        a.name in (*b.plugin.cls.before, *b.plugin.cls.after)
        for a, b in ((one, other), (other, one))
    )


def whose(stage: Candidate) -> str:
    """Return a stage's name with its distribution or file, for messages."""
    ref = stage.plugin.ref
    return f"stage {stage.name!r} of {ref.distribution or ref.path}"
