"""Checks, before generation, that a dataset's rows can be scored; and the installed functions that rows select by `data_source`."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.errors import ConfigError, DataError, nearest
from dovetail.interfaces import PluginRef, Prompt
from dovetail.sections import RewardSection
from dovetail_rollouts.scoring.functions import ConfiguredFunctions, InstalledFunctions

SHOWN = 5
"""The most problems of one kind that a message lists."""


def check_sources(functions: ConfiguredFunctions, prompts: Iterable[Prompt]) -> None:
    """Check that every row can be scored.

    If the reward manager needs functions, each data source must have one. The functions must accept the rows' ground truths. Functions that
    score whole groups need a manager that scores groups.

    Raises:
        ConfigError: a data source has no function, or a function scores groups and the manager single samples.
        DataError: a ground truth can't be scored; names the first such rows.
        PluginError: the manager can't be loaded.
    """
    judges = functions.judges()
    unmapped: dict[str | None, Prompt] = {}
    bad_rows = []
    grouped: set[str] = set()
    for prompt in prompts:
        rules = list(judges.own)
        if judges.needs_functions:
            rule = functions.rule_for(prompt.data_source)
            if rule is None:
                unmapped.setdefault(prompt.data_source, prompt)
                continue
            rules.append(rule)
        for rule in rules:
            problem = rule.check_row(prompt.ground_truth)
            if problem:
                bad_rows.append(f"{prompt}: {rule.call.name} can't score this row: {problem}")
            if rule.call.unit == "group":
                grouped.add(rule.call.name)
    if unmapped:
        problems = [functions.complaint(source, str(row)) for source, row in unmapped.items()]
        raise ConfigError(
            _listed(problems), hint=functions.fix(next(iter(unmapped))), problems=problems
        )
    if grouped and judges.unit != "group":
        raise ConfigError(
            f"reward.manager.name={judges.manager} passes single samples, but {', '.join(sorted(grouped))} can score "
            "only whole groups",
            hint="set reward.manager.name=group",
        )
    if bad_rows:
        raise DataError(
            _listed(bad_rows),
            hint="fix reward_model.ground_truth of these rows, or choose another function",
        )


def unused_functions(section: RewardSection, prompts: Iterable[Prompt]) -> list[str]:
    """Return a message for each data source in `reward.functions` that no row has.

    The message names the most similar data source of the rows, or all data sources if none is similar.
    """
    if not section.functions:
        return []
    sources = {prompt.data_source for prompt in prompts}
    there = sorted(source for source in sources if source is not None)
    said = []
    for source in section.functions.keys() - sources:
        close = nearest(source, there)
        instead = (
            f"did you mean {close!r}?"
            if close
            else f"the rows have {', '.join(map(repr, there)) or 'none'}"
        )
        said.append(
            f"reward.functions names the data_source {source!r}, which no row has; {instead}"
        )
    return sorted(said)


def functions_found_by_rows(section: RewardSection, prompts: Iterable[Prompt]) -> list[PluginRef]:
    """Return the installed functions that rows select by their `data_source` alone, without the config."""
    from dovetail.plugins import ref_for

    loader = InstalledFunctions()
    if section.function is not None or not loader.manager(section.manager).needs_functions(
        section.manager
    ):
        return []
    sources = {prompt.data_source for prompt in prompts} - section.functions.keys()
    sections = [loader.section_for(source) for source in sorted(s for s in sources if s)]
    return [ref_for("reward_function", found) for found in sections if found is not None]


def _listed(problems: list[str]) -> str:
    """Return the first problems and the number of further problems as text."""
    more = len(problems) - SHOWN
    return "\n".join([*problems[:SHOWN], *([f"… and {more} more"] if more > 0 else [])])
