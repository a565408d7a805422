"""Narrowing: a section that selects a plugin gets that plugin's Config; keys that layers gave for another plugin are dropped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from dovetail.config.aliases import key_advice
from dovetail.config.keys import KeyPath, format_path
from dovetail.config.layers import DEFAULT_LAYER, DEFAULT_RANK, Given
from dovetail.config.problems import ConfigProblem, show_value
from dovetail.config.schema import fields_of
from dovetail.errors import DovetailError
from dovetail.sections.fields import SELECTORS

Resolver = Callable[[str, Mapping[str, Any]], type]
"""Function that returns a plugin's Config class for a kind and a raw section; raises PluginError if there is none."""

_DEFAULT_ATTRIBUTES = {"reward_function": "compute_score"}
_Selectors = dict[str, tuple[str, str]]
"""Keys that select a plugin (`name`, or `path` and `attribute`), each with its value and the layer that gave it."""


@attrs.frozen(kw_only=True)
class Narrowed:
    """The plugin that a section selects, and the values for it."""

    cls: type
    """The plugin's Config class; the kind's base class if no Config is found."""
    keys: Mapping[str, str]
    """The keys that select the plugin: `name`, or `path` and `attribute`; empty if none is selected."""
    origins: Mapping[str, str]
    """The layer that gave each key of `keys`."""
    givens: Sequence[Given]
    """Each layer's values for the section, without the keys that select the plugin."""
    problems: Sequence[ConfigProblem]
    """Problems of the choice, of the Config, or of keys that can't be checked without a Config class."""
    warnings: Sequence[str]
    """Warnings about dropped keys, each a full sentence."""


@attrs.define
class _Choice:
    """The plugin that a section selects."""

    selectors: _Selectors
    since: int = DEFAULT_RANK
    """Rank of the layer that chose this plugin; keys of earlier layers were written for another plugin."""
    by_preset: bool = False
    """Whether a preset chose this plugin in place of another; then all keys of earlier layers are dropped, even known ones."""
    presets: tuple[str, ...] = ()
    """The plugin for which the preset sets keys in this section, as `_plugin_of` returns it; empty if no plugin is selected."""


def narrow(
    mappings: Sequence[Given],
    path: KeyPath,
    *,
    kind: str,
    default: str | None,
    base: type,
    resolver: Resolver,
) -> Narrowed:
    """Find the plugin that a section selects over all layers, and drop keys that earlier layers set for another plugin.

    If a preset selects another plugin, all keys that earlier layers set for this section are dropped: a preset is a published
    combination. Dropped keys cause a warning, unless a layer gives them again or they equal the plugin's defaults.

    Args:
        mappings: the values that each layer gives, in order.
        path: the path of the section.
        kind: the kind of the plugin.
        default: the name of the plugin if no layer selects one.
        base: the class that the plugin's Config must extend.
        resolver: the function that returns the Config class.
    """
    problems: list[ConfigProblem] = []
    choice = _select(mappings, path, default, problems)
    problems.extend(_complete(kind, choice.selectors, path))
    keys = {key: choice.selectors[key][0] for key in SELECTORS if key in choice.selectors}
    found: type | None = None
    if not problems:
        given_keys = {key: value for given in mappings for key, value in given.value.items()}
        section = {key: given_keys[key] for key in given_keys if key not in SELECTORS} | keys
        answer = _config_class(kind, section, base, resolver)
        if isinstance(answer, str):
            selector = "path" if "path" in keys else "name"
            value, origin = choice.selectors[selector]
            problems.append(
                ConfigProblem(path=(*path, selector), value=value, origin=origin, text=answer)
            )
        else:
            found = answer
    fields = fields_of(found or base)
    renewed = {key for given in mappings if given.layer.rank >= choice.since for key in given.value}
    dropped: dict[bool, list[ConfigProblem]] = {False: [], True: []}
    givens = []
    for given in mappings:
        kept = {}
        for key, value in _own_keys(given, choice).items():
            where, field = (*path, key), fields.get(key)
            problem = ConfigProblem(path=where, value=value, text="", origin=given.layer.at(where))
            if found is None and field is None:
                if advice := key_advice(where, value):
                    problems.append(attrs.evolve(problem, text=advice))
            elif (
                found is None
                or given.layer.rank >= choice.since
                or (field and not choice.by_preset)
            ):
                kept[key] = value
            elif not (field and (key in renewed or value == field.default())):
                dropped[field is not None].append(problem)
        givens.append(Given(kept, given.layer))
    chosen, by = choice.selectors.get("path") or choice.selectors.get("name") or ("", "")
    return Narrowed(
        cls=found or base,
        keys=keys,
        origins={key: choice.selectors[key][1] for key in keys},
        givens=givens,
        problems=problems,
        warnings=list(_in_words(dropped, f"dropped: {kind} {chosen!r}, chosen by {by},")),
    )


def _own_keys(given: Given, choice: _Choice) -> dict[str, Any]:
    """Return a layer's values without the keys that select the plugin; empty if a preset wrote them for another plugin."""
    if given.layer.is_preset and choice.presets != _plugin_of(choice.selectors):
        return {}
    return {key: value for key, value in given.value.items() if key not in SELECTORS}


def _select(
    givens: Iterable[Given], path: KeyPath, default: str | None, problems: list[ConfigProblem]
) -> _Choice:
    """Find the plugin that the layers select: later layers win, and layers of one rank are read together."""
    choice = _Choice({"name": (default, DEFAULT_LAYER)} if default else {})
    choice.presets = _plugin_of(choice.selectors)
    for rank, group in itertools.groupby(givens, key=lambda given: given.layer.rank):
        together = list(group)
        is_preset = together[0].layer.is_preset
        now = _selectors_of(together, path, problems)
        gone = {"path", "attribute"} if "name" in now else {"name"} if "path" in now else set()
        before = _plugin_of(choice.selectors)
        choice.selectors = {
            key: choice.selectors[key] for key in choice.selectors.keys() - gone
        } | now
        if is_preset and gone:
            choice.presets = _plugin_of(choice.selectors)
        if _plugin_of(choice.selectors) != before:
            choice.since, choice.by_preset = rank, is_preset
    return choice


def _plugin_of(selectors: _Selectors) -> tuple[str, ...]:
    """Return what identifies the plugin: its name, without the distribution of `name@distribution`, or the values of path and attribute."""
    if "path" not in selectors:
        return (selectors["name"][0].partition("@")[0],) if "name" in selectors else ()
    return (selectors["path"][0], selectors.get("attribute", ("",))[0])


def _selectors_of(
    givens: Iterable[Given], path: KeyPath, problems: list[ConfigProblem]
) -> _Selectors:
    """Return the selecting keys of the layers of one rank, and record problems with them."""
    selectors: _Selectors = {}
    for given in givens:
        for key in SELECTORS:
            value, where = given.value.get(key), (*path, key)
            origin = given.layer.at(where)
            if isinstance(value, str):
                selectors[key] = (value, origin)
            elif value is not None:
                text = "expected text; put the value in quotes"
                problems.append(ConfigProblem(path=where, value=value, text=text, origin=origin))
    if "name" in selectors and "path" in selectors:
        (name, by_name), (file, by_path) = selectors["name"], selectors.pop("path")
        text = (
            f"gives both name = {name!r} ({by_name}) and path = {file!r} ({by_path}); keep `name` for an "
            "installed plugin, or `path` for a file"
        )
        problems.append(ConfigProblem(path=path, text=text))
    return selectors


def _complete(kind: str, selectors: _Selectors, path: KeyPath) -> Iterator[ConfigProblem]:
    """Fill in `attribute` if the kind has a default for it, and yield a problem for each missing key."""
    attribute = (*path, "attribute")
    if not selectors:
        text = (
            f"selects no plugin: give the `name` of a {kind}, or `path` and `attribute` of a file"
        )
        yield ConfigProblem(path=path, text=text)
    elif "path" not in selectors and "attribute" in selectors:
        value, origin = selectors["attribute"]
        text = "`attribute` needs `path`, the file that holds it; remove `attribute`, or give `path` in place of `name`"
        yield ConfigProblem(path=attribute, value=value, origin=origin, text=text)
    elif "path" in selectors and "attribute" not in selectors and kind in _DEFAULT_ATTRIBUTES:
        selectors["attribute"] = (_DEFAULT_ATTRIBUTES[kind], DEFAULT_LAYER)
    elif "path" in selectors and "attribute" not in selectors:
        file, origin = selectors["path"]
        text = f"not given; give the name of the class in {file} that is the {kind} plugin (path came from {origin})"
        yield ConfigProblem(path=attribute, text=text)


def _config_class(
    kind: str, section: Mapping[str, Any], base: type, resolver: Resolver
) -> type | str:
    """Return the chosen plugin's Config, or the reason why there is none as text."""
    try:
        cls = resolver(kind, section)
        if issubclass(cls, base):
            fields_of(cls)
            return cls
    except DovetailError as error:
        return str(error)
    except NameError as error:
        return f"the plugin's Config has an annotation that can't be resolved: {error}"
    return f"the plugin's Config {cls.__module__}.{cls.__qualname__} does not extend {base.__qualname__}"


def _in_words(dropped: Mapping[bool, Sequence[ConfigProblem]], choice: str) -> Iterator[str]:
    """Yield one warning for each reason why keys were dropped.

    Args:
        dropped: the dropped keys: under False those that the selected plugin does not have, under True those that it has.
        choice: the words between the keys and the reason, which name the selected plugin.
    """
    for known, keys in dropped.items():
        if keys:
            reason = "has no such key" + ("s" if keys[1:] else "")
            if known:
                reason = f"is meant to be used without {'them' if keys[1:] else 'it'}"
            named = ", ".join(f"{format_path(key.path)} = {show_value(key.value)}" for key in keys)
            places = ", ".join(dict.fromkeys(str(key.origin) for key in keys))
            yield f"{named} ({places}): {choice} {reason}"
