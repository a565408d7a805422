"""Which plugin a section selects: by name or by file, and since which layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from dovetail.config.keys import KeyPath
from dovetail.config.layers import DEFAULT_LAYER, DEFAULT_RANK, Given
from dovetail.config.problems import ABSENT, Problem

Resolver = Callable[[str, Mapping[str, Any]], type]
"""Finds a plugin's Config class from its kind and its raw section; raises PluginError where there is none."""

SELECTORS = ("name", "path", "attribute")
"""The keys that select a plugin."""

_DEFAULT_ATTRIBUTES = {"reward_function": "compute_score"}


@attrs.frozen(kw_only=True)
class Choice:
    """What a section selects."""

    keys: Mapping[str, str]
    """`name`, or `path` and `attribute`; empty where nothing is selected."""
    origins: Mapping[str, str]
    """The layer that each of them came from."""
    since: int
    """Rank of the layer that chose this plugin; keys of layers before it were written for another."""
    follows_preset: bool
    """Whether it is the plugin that the preset's keys in this section were written for."""
    fresh_since: int
    """Rank of the preset that chose it in place of another; keys of layers before it have no part, known or not."""
    description: str
    """The plugin in words."""
    problems: tuple[Problem, ...]


def select(kind: str, givens: Iterable[Given], path: KeyPath, *, default: str | None) -> Choice:
    """Find the plugin that the mappings in `givens`, in the order of their layers, select together."""
    said: dict[str, tuple[str, str]] = {}
    if default:
        said["name"] = (default, DEFAULT_LAYER)
    preset_said = dict(said)
    fresh_since = DEFAULT_RANK
    since = DEFAULT_RANK
    problems: list[Problem] = []
    for rank, group in itertools.groupby(givens, key=lambda given: given.layer.rank):
        together = list(group)
        before = _plugin_of(said)
        now = _said(together, path, problems)
        if "name" in now and "path" in now:
            problems.append(_both(now, path))
            del now["path"]
        for selector, other in (("name", "path"), ("path", "name")):
            if selector not in now:
                continue
            if said.get(selector, ("",))[0] != now[selector][0]:
                since = rank
            said.pop(other, None)
            if selector == "name":
                said.pop("attribute", None)
        said.update(now)
        by_preset = together[0].layer.is_preset
        if by_preset:
            preset_said = dict(said if _plugin_of(now) else preset_said)
        if _plugin_of(said) != before:
            fresh_since = rank if by_preset else DEFAULT_RANK
    problems.extend(_complete(kind, said, path))
    chosen = said.get("path") or said.get("name") or ("", "")
    return Choice(
        keys={key: said[key][0] for key in SELECTORS if key in said},
        origins={key: said[key][1] for key in SELECTORS if key in said},
        since=since,
        follows_preset=_plugin_of(said) == _plugin_of(preset_said),
        fresh_since=fresh_since,
        description=f"{kind} {chosen[0]!r}, chosen by {chosen[1]},",
        problems=tuple(problems),
    )


def _plugin_of(said: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """The plugin itself; naming the distribution besides chooses no other."""
    if "path" not in said:
        return (said["name"][0].partition("@")[0],) if "name" in said else ()
    return (said["path"][0], said.get("attribute", ("",))[0])


def _said(
    givens: Iterable[Given], path: KeyPath, problems: list[Problem]
) -> dict[str, tuple[str, str]]:
    """What one rank of layers says: selector to value and origin."""
    said: dict[str, tuple[str, str]] = {}
    for given in givens:
        for key in SELECTORS:
            value, where = given.value.get(key), (*path, key)
            if value is None:
                continue
            if isinstance(value, str):
                said[key] = (value, given.layer.at(where))
            else:
                text = 'expected str; write "…" around it'
                problems.append(
                    Problem(path=where, value=value, text=text, origin=given.layer.at(where))
                )
    return said


def _both(said: Mapping[str, tuple[str, str]], path: KeyPath) -> Problem:
    return Problem(
        path=path,
        text=f"gives both name = {said['name'][0]!r} ({said['name'][1]}) and path = {said['path'][0]!r} "
        f"({said['path'][1]}); keep `name` for an installed plugin, or `path` for a file",
    )


def _complete(kind: str, said: dict[str, tuple[str, str]], path: KeyPath) -> Iterable[Problem]:
    """Fill in the attribute where it has a default, and say what is missing."""
    if "path" in said and "attribute" not in said:
        if kind in _DEFAULT_ATTRIBUTES:
            said["attribute"] = (_DEFAULT_ATTRIBUTES[kind], DEFAULT_LAYER)
        else:
            file, origin = said["path"]
            yield Problem(
                path=(*path, "attribute"),
                value=ABSENT,
                text=f"not given; name the class in {file} that is the {kind} plugin (path came from {origin})",
            )
    elif "attribute" in said and "path" not in said:
        yield Problem(
            path=(*path, "attribute"),
            value=said["attribute"][0],
            origin=said["attribute"][1],
            text="goes with `path`, the file that holds it, and is not used with `name`",
        )
    elif not said:
        yield Problem(
            path=path,
            text=f"selects no plugin: give the `name` of a {kind}, or `path` and `attribute` of a file",
        )
