"""The choice of each row's reward function, by the reward section and the plugin index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs

from dovetail.errors import ConfigError, PluginNotFoundError, nearest
from dovetail.interfaces import PluginContext, PluginRef, RewardFunction, RewardManager
from dovetail.plugins import default_index, load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection, RewardSection
from dovetail_rollouts.scoring.reward_calls import RewardCall, RewardFunctions


class InstalledFunctions:
    """Loads reward functions through the plugin index, or from a user's file."""

    def selected(self, section: PluginSection, context: PluginContext) -> RewardFunction:
        """Return the reward function that a config section selects."""
        return cast("RewardFunction", make_plugin(ref_for("reward_function", section), context))

    def named(self, data_source: str, context: PluginContext) -> RewardFunction | None:
        """Return the installed reward function that `section_for` finds for a data source; None if there is none."""
        section = self.section_for(data_source)
        return None if section is None else self.selected(section, context)

    def section_for(self, data_source: str) -> PluginSection | None:
        """Return the section that selects the installed reward function of a data source; None if there is none.

        A function's name or alias equals the data source, or an alias is a pattern that matches it, such as `aime*`.
        """
        name = data_source
        try:
            default_index().find("reward_function", name)
        except PluginNotFoundError:
            patterns = [alias for alias in self.known() if "*" in alias]
            name = next((each for each in patterns if fnmatchcase(data_source, each)), "")
            if not name:
                return None
        return PluginSection(name=name)

    def known(self) -> list[str]:
        """Return names and aliases of the installed reward functions."""
        entries = [e for e in default_index().entries("reward_function") if e.usable]
        return [name for entry in entries for name in (entry.name, *entry.aliases)]

    def manager(self, section: PluginSection) -> type[RewardManager]:
        """Return the class of the reward manager that a config section selects."""
        return cast("type[RewardManager]", load_plugin_class(ref_for("reward_manager", section)))


@attrs.frozen(eq=False)
class _Rule:
    """A reward function that is ready to call, and its check of a row's ground truth, which returns what is wrong or None."""

    call: RewardCall
    check_row: Callable[[Any], str | None]


@attrs.frozen(kw_only=True)
class Judges:
    """What a reward manager requires of the rows and of the reward functions."""

    manager: str = "naive"
    unit: str = "sample"
    """What the manager scores at once: `sample` or `group`."""
    needs_functions: bool = True
    """Whether the manager scores with the functions of the reward section."""
    own: tuple[_Rule, ...] = ()
    """The reward functions that the manager's own config selects."""


class ConfiguredFunctions(RewardFunctions):
    """The reward functions of a run, as the reward section selects them.

    A row's function is `reward.functions[data_source]`, else `reward.function`, else the installed function named `data_source`. The
    cache of functions is not pickled; another process constructs the functions again from the config.
    """

    def __init__(
        self,
        section: RewardSection,
        context: PluginContext,
        loader: InstalledFunctions,
        given: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self._given = None if given is None else _Rule(RewardCall(given), lambda _: None)
        self._section = section
        self._context = context
        self._loader = loader
        self._rules: dict[str | None, _Rule | None] = {}

    def function_for(self, data_source: str | None) -> RewardCall:
        rule = self.rule_for(data_source)
        if rule is None:
            raise ConfigError(self.complaint(data_source), hint=self.fix(data_source))
        return rule.call

    def rule_for(self, data_source: str | None) -> _Rule | None:
        """Return the reward function of a data source with its check of ground truths, cached; None if no function scores the source."""
        if self._given is not None:
            return self._given
        if data_source not in self._rules:
            self._rules[data_source] = self._make(data_source)
        return self._rules[data_source]

    def files(self) -> tuple[PluginRef, ...]:
        sections = [*self._section.functions.values(), self._section.function]
        return tuple(
            PluginRef(
                kind="reward_function",
                name=section.attribute or "compute_score",
                path=section.path,
                attribute=section.attribute or "compute_score",
            )
            for section in sections
            if section is not None and section.path is not None
        )

    def judges(self) -> Judges:
        """Return what the reward manager requires of rows and reward functions.

        Raises:
            PluginError: the manager, or a function that its own config selects, can't be loaded.
        """
        section = self._section.manager
        if section is None or section.name is section.path is None:
            return Judges()
        manager = self._loader.manager(section)
        own = manager.own_functions(section)
        return Judges(
            manager=section.name or manager.name,
            unit=manager.unit,
            needs_functions=manager.needs_functions(section),
            own=tuple(
                _rule(self._loader.selected(function, self._context), function)
                for function in own.values()
            ),
        )

    def complaint(self, data_source: str | None, where: str = "") -> str:
        """Return the error text for a data source that no function scores; `where` names the row."""
        place = f" ({where})" if where else ""
        if data_source is None:
            return f"a row without data_source{place} has no reward function: reward.function is not set"
        known = [*self._section.functions, *self._loader.known()]
        close = nearest(data_source, known)
        return (
            f"data_source {data_source!r}{place} has no reward function; "
            f"functions exist for: {', '.join(sorted(set(known))) or 'none'}"
            f"{f'; nearest: {close!r}' if close else ''}"
        )

    def fix(self, data_source: str | None) -> str:
        """Return the hint of how to set a reward function for a data source."""
        everywhere = (
            "set reward.function={path: my_reward.py, attribute: compute_score} for every row"
        )
        if data_source is None:
            return f"{everywhere}, or give each row a data_source"
        return f'{everywhere}, or reward.functions={{"{data_source}": {{name: exact_match}}}} for this data_source'

    def _make(self, data_source: str | None) -> _Rule | None:
        section = self._section.functions.get(data_source or "", self._section.function)
        if section is not None:
            return _rule(self._loader.selected(section, self._context), section)
        if data_source is None:
            return None
        function = self._loader.named(data_source, self._context)
        return None if function is None else _rule(function, None)

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_rules": {}}


def configured_functions(
    section: RewardSection,
    context: PluginContext,
    *,
    loader: InstalledFunctions | None = None,
    given: Callable[..., Any] | None = None,
) -> ConfiguredFunctions:
    """Return the reward functions that a section selects, and construct the functions that it names.

    Args:
        section: the `reward` section.
        context: the context of the functions.
        loader: the loader of the functions; by default the plugin index.
        given: a function that scores every row, in place of the functions that the section selects.

    Raises:
        PluginError: a selected function can't be loaded.
        ConfigError: a user's function needs a parameter that is not passed to reward functions.
    """
    functions = ConfiguredFunctions(section, context, loader or InstalledFunctions(), given)
    for source in section.functions:
        functions.rule_for(source)
    if section.function is not None:
        functions.rule_for(None)
    return functions


def _rule(function: RewardFunction, section: PluginSection | None) -> _Rule:
    name = type(function).name
    if section is not None and section.path is not None:
        name = f"{Path(section.path).name}:{name}"
    check = partial(type(function).check_row, function.config)
    return _Rule(RewardCall(function.compute_score, name), check)
