"""Which reward function scores which row: resolved from the reward section, and checked before anything is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import attrs

from dovetail.config.sections import PluginSection, RewardSection
from dovetail.errors import ConfigError, DataError, PluginNotFoundError, nearest
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.reward import RewardFunction
from dovetail.interfaces.reward_calls import RewardCall, RewardFunctions

SHOWN = 5
"""Complaints of one kind that a message lists."""


class FunctionLoader(Protocol):
    """Makes reward functions."""

    def selected(self, section: PluginSection, context: PluginContext) -> RewardFunction:
        """What a config section selects."""
        ...

    def named(self, data_source: str, context: PluginContext) -> RewardFunction | None:
        """The installed one whose name or alias is this data source; None where there is none."""
        ...

    def known(self) -> list[str]:
        """Names and aliases of the installed ones."""
        ...


class InstalledFunctions:
    """Loads reward functions through the plugin index, or from a user's file."""

    def selected(self, section: PluginSection, context: PluginContext) -> RewardFunction:
        from dovetail.plugins.load import make, ref_for

        return cast("RewardFunction", make(ref_for("reward_function", section), context))

    def named(self, data_source: str, context: PluginContext) -> RewardFunction | None:
        from dovetail.plugins.index import default_index

        try:
            default_index().find("reward_function", data_source)
        except PluginNotFoundError:
            return None
        return self.selected(PluginSection(name=data_source), context)

    def known(self) -> list[str]:
        from dovetail.plugins.index import default_index

        entries = [e for e in default_index().entries("reward_function") if e.usable]
        return [name for entry in entries for name in (entry.name, *entry.aliases)]


@attrs.frozen(eq=False)
class _Rule:
    """A function ready to call, and its check of ground truths."""

    call: RewardCall
    check_row: Callable[[Any], str | None]


class ConfiguredFunctions(RewardFunctions):
    """The functions of a run. The order: `reward.functions[data_source]`, `reward.function`, an installed function named so.

    It pickles as config: another process makes the functions for itself.
    """

    def __init__(
        self, section: RewardSection, context: PluginContext, loader: FunctionLoader
    ) -> None:
        super().__init__()
        self._section = section
        self._context = context
        self._loader = loader
        self._rules: dict[str | None, _Rule | None] = {}

    def function_for(self, data_source: str | None) -> RewardCall:
        rule = self.rule_for(data_source)
        if rule is None:
            raise ConfigError(self.complaint(data_source), hint=self.mend(data_source))
        return rule.call

    def rule_for(self, data_source: str | None) -> _Rule | None:
        """The rule of this source; None where nothing scores it. Made once a source."""
        if data_source not in self._rules:
            self._rules[data_source] = self._make(data_source)
        return self._rules[data_source]

    def complaint(self, data_source: str | None, where: str = "") -> str:
        """What is wrong with a source that nothing scores."""
        place = f" ({where})" if where else ""
        if data_source is None:
            return f"a row without data_source{place} has no reward function: reward.function is not set"
        known = [*self._section.functions, *self._loader.known()]
        close = nearest(data_source, known)
        return (
            f"data_source {data_source!r}{place} has no reward function; "
            f"known are: {', '.join(sorted(set(known))) or 'none'}"
            f"{f'; nearest: {close!r}' if close else ''}"
        )

    def mend(self, data_source: str | None) -> str:
        """How to give a source its function."""
        everywhere = (
            "set reward.function={path: my_reward.py, attribute: compute_score} for every row"
        )
        if data_source is None:
            return f"{everywhere}, or give each row a data_source"
        return f'{everywhere}, or reward.functions: {{"{data_source}": {{name: exact_match}}}}'

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


def build_functions(
    section: RewardSection, context: PluginContext, *, loader: FunctionLoader | None = None
) -> ConfiguredFunctions:
    """The reward functions of a run; those that the config selects are made at once.

    Args:
        section: the `reward` section.
        context: what the functions are told about the run.
        loader: what makes them; the plugin index where absent.

    Raises:
        PluginError: a selected function can't be loaded.
        ConfigError: a user's function needs parameters that rewards are not given.
    """
    functions = ConfiguredFunctions(section, context, loader or InstalledFunctions())
    for source in section.functions:
        functions.rule_for(source)
    if section.function is not None:
        functions.rule_for(None)
    return functions


def check_sources(functions: ConfiguredFunctions, prompts: Iterable[Prompt]) -> None:
    """Check that every row can be scored: its source has a function, and that function accepts its ground truth.

    Raises:
        ConfigError: some sources have no function; names each with its first row.
        DataError: some ground truths can't be scored; names the first rows.
    """
    unmapped: dict[str | None, Prompt] = {}
    bad_rows = []
    for prompt in prompts:
        rule = functions.rule_for(prompt.data_source)
        if rule is None:
            unmapped.setdefault(prompt.data_source, prompt)
            continue
        problem = rule.check_row(prompt.ground_truth)
        if problem:
            bad_rows.append(f"{prompt}: {rule.call.name} can't score it: {problem}")
    if unmapped:
        problems = [functions.complaint(source, str(row)) for source, row in unmapped.items()]
        raise ConfigError(
            _listed(problems), hint=functions.mend(next(iter(unmapped))), problems=problems
        )
    if bad_rows:
        raise DataError(
            _listed(bad_rows),
            hint="mend reward_model.ground_truth of these rows, or choose another function",
        )


def _listed(problems: list[str]) -> str:
    """The first problems, and how many more there are."""
    more = len(problems) - SHOWN
    return "\n".join([*problems[:SHOWN], *([f"… and {more} more"] if more > 0 else [])])


def _rule(function: RewardFunction, section: PluginSection | None) -> _Rule:
    name = type(function).name
    if section is not None and section.path is not None:
        name = f"{Path(section.path).name}:{name}"
    check = partial(type(function).check_row, function.config)
    return _Rule(RewardCall(function.compute_score, name), check)
