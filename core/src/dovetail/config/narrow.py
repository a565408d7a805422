"""A section that selects a plugin becomes that plugin's: its Config is found, and what layers wrote for another one goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs

from dovetail.config.advice import key_advice
from dovetail.config.dropped import Dropped, in_words
from dovetail.config.keys import KeyPath
from dovetail.config.layers import Given
from dovetail.config.problems import Problem
from dovetail.config.schema import fields_of
from dovetail.config.selection import SELECTORS, Choice, Resolver
from dovetail.errors import DovetailError


@attrs.frozen(kw_only=True)
class Narrowed:
    """A section of the chosen plugin."""

    cls: type
    """Its Config; the base where there is none to be had."""
    givens: Sequence[Given]
    """What each layer gives for it, without what selects it."""
    problems: Sequence[Problem]
    """What is wrong with the choice, the Config, or keys that nobody can judge."""
    warnings: Sequence[str]
    """What was dropped, each a full sentence."""


def narrow(
    choice: Choice,
    mappings: Sequence[Given],
    path: KeyPath,
    *,
    kind: str,
    base: type,
    resolver: Resolver,
) -> Narrowed:
    """Narrow a section to the chosen plugin's class, and drop what a plugin chosen earlier left behind.

    Args:
        choice: what `mappings` select.
        mappings: what each layer gives, in order.
        path: of the section.
        kind: of the plugin.
        base: what its Config must extend.
        resolver: finds the Config.
    """
    problems = list(choice.problems)
    found: type | None = None
    if not problems:
        answer = _config_class(choice, mappings, path, kind, base, resolver)
        if isinstance(answer, Problem):
            problems.append(answer)
        else:
            found = answer
    since = (given.value for given in mappings if given.layer.rank >= choice.fresh_since)
    renewed = {key for keys in since for key in keys}
    dropped: list[Dropped] = []
    givens = []
    for given in mappings:
        if found is not None:
            kept = _known_keys(given, found, choice, path, renewed, dropped)
        else:
            kept, unknown = _unjudged_keys(given, base, choice, path)
            problems += unknown
        givens.append(Given(kept, given.layer))
    return Narrowed(
        cls=found or base,
        givens=givens,
        problems=problems,
        warnings=list(in_words(dropped, choice.description)),
    )


def _config_class(
    choice: Choice,
    mappings: Sequence[Given],
    path: KeyPath,
    kind: str,
    base: type,
    resolver: Resolver,
) -> type | Problem:
    """The chosen plugin's Config, or why there is none."""
    raw: dict[str, Any] = dict(choice.keys)
    for given in mappings:
        raw.update((key, value) for key, value in given.value.items() if key not in SELECTORS)
    try:
        cls = resolver(kind, raw)
        if issubclass(cls, base):
            fields_of(cls)
            return cls
        text = (
            f"its Config, {cls.__module__}.{cls.__qualname__}, does not extend {base.__qualname__}"
        )
    except DovetailError as error:
        text = str(error)
    except NameError as error:
        text = f"its Config has an annotation that can't be resolved: {error}"
    selector = "path" if "path" in choice.keys else "name"
    return Problem(
        path=(*path, selector),
        value=choice.keys[selector],
        origin=choice.origins[selector],
        text=text,
    )


def _known_keys(
    given: Given,
    cls: type,
    choice: Choice,
    path: KeyPath,
    renewed: Collection[str],
    dropped: list[Dropped],
) -> dict[str, Any]:
    """What the class knows of a contribution; of layers since the plugin was chosen, everything.

    Where it is a preset that chooses another plugin, what earlier layers wrote goes, known or not: it stands for
    a published combination, in which values meant for another plugin have no part. Nothing is said of keys that
    a layer gives anew (`renewed`), nor of values that are the plugin's default anyway; of the others `dropped` tells.
    """
    kept: dict[str, Any] = {}
    for key, value in _own_keys(given, choice).items():
        known = fields_of(cls).get(key)
        if known and given.layer.rank >= choice.fresh_since:
            kept[key] = value
        elif known and (key in renewed or value == known.default()):
            continue
        elif given.layer.rank < choice.since:
            is_known = known is not None
            dropped.append(
                Dropped(path=(*path, key), value=value, layer=given.layer, known=is_known)
            )
        else:
            kept[key] = value
    return kept


def _unjudged_keys(
    given: Given, base: type, choice: Choice, path: KeyPath
) -> tuple[dict[str, Any], list[Problem]]:
    """What the base knows of a contribution where the plugin was not found: nobody can judge the rest, but for known mistakes."""
    kept: dict[str, Any] = {}
    problems = []
    for key, value in _own_keys(given, choice).items():
        where = (*path, key)
        if key in fields_of(base):
            kept[key] = value
        elif advice := key_advice(where, value):
            origin = given.layer.at(where)
            problems.append(Problem(path=where, value=value, text=advice, origin=origin))
    return kept, problems


def _own_keys(given: Given, choice: Choice) -> dict[str, Any]:
    """A contribution without what selects the plugin. What a preset wrote for another plugin means nothing to this one."""
    if given.layer.is_preset and not choice.follows_preset:
        return {}
    return {key: value for key, value in given.value.items() if key not in SELECTORS}
