"""Layers become one tree: later values win, shorthands are spelt out, plugin sections know their class.

The schema steers the merge: it says where a bare string names a plugin, which lists overrides may index, and which
keys a newly chosen plugin does not know.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import attrs

from dovetail.config.advice import key_advice, section_advice
from dovetail.config.keys import KeyPath, leaves
from dovetail.config.layers import (
    DEFAULT_LAYER,
    DEFAULT_RANK,
    ByIndex,
    Given,
    Layer,
    is_mapping,
)
from dovetail.config.mismatch import mismatch
from dovetail.config.overrides import NotYaml
from dovetail.config.problems import ABSENT, Problem
from dovetail.config.schema import Field, describe, fields_of, without_none
from dovetail.config.selection import SELECTORS, Choice, Resolver, select
from dovetail.config.serialise import given_values
from dovetail.config.shapes import always_there, default_entries, element_types, shape_of
from dovetail.errors import DovetailError

Interpolate = Callable[[str, KeyPath], Any]
"""Resolves the `${…}` in a string found at a key path; raises ValueError where it can't."""

_DEFAULTS = Layer(rank=DEFAULT_RANK, name=DEFAULT_LAYER, tree={})


class SectionDict(dict[str, Any]):
    """A section's merged keys, with the class that they are for."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls


class Merger:
    """Merges layers once and collects everything that is wrong on the way.

    Attributes:
        problems: what is wrong, in the order of the schema.
        warnings: what was dropped, each a full sentence.
        origins: the layer that each given key came from.
    """

    def __init__(self, resolver: Resolver, interpolate: Interpolate | None = None) -> None:
        self._resolver = resolver
        self._interpolate = interpolate
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.origins: dict[KeyPath, str] = {}

    def merge(self, cls: type, layers: Iterable[Layer]) -> SectionDict:
        """The whole tree of a config class; sections that no layer gives are there, empty."""
        return self._section(cls, [Given(layer.tree, layer) for layer in layers], ())

    def _section(self, cls: type, givens: Sequence[Given], path: KeyPath) -> SectionDict:
        merged = SectionDict(cls)
        by_key: dict[str, list[Given]] = {}
        for given in givens:
            if not is_mapping(given.value):
                advice = section_advice(path, given.value)
                text = str(mismatch(given.value, cls))
                self._problem(given, path, f"{text}; {advice}" if advice else text)
                continue
            for key, value in given.value.items():
                by_key.setdefault(key, []).append(Given(value, given.layer))
        for field in fields_of(cls).values():
            value = self._field(field, by_key.pop(field.name, []), (*path, field.name))
            if value is not ABSENT:
                merged[field.name] = value
        for key, unknown in by_key.items():
            merged[key] = self._kept(unknown[-1], (*path, key))
        return merged

    def _field(self, field: Field, givens: list[Given], path: KeyPath) -> Any:
        default = field.default()
        if not givens and not always_there(field, default):
            return ABSENT
        if default is not attrs.NOTHING and not field.kind and (base := given_values(default)):
            givens = [Given(base, _DEFAULTS), *givens]
        return self._value(field.type, field, givens, path)

    def _value(self, tp: Any, field: Field, givens: list[Given], path: KeyPath) -> Any:
        inner, optional = without_none(tp)
        shape = shape_of(inner, field, givens)
        if shape == "leaf":
            return self._kept(givens[-1], path, field)
        givens = [done for given in givens if (done := self._ready(given, path, field))]
        nulls = [index for index, given in enumerate(givens) if given.value is None]
        if nulls:
            if nulls[-1] == len(givens) - 1 and (optional or shape != "plugin"):
                return self._kept(givens[-1], path, field)
            if nulls[-1] == len(givens) - 1:
                self._problem(
                    givens[-1], path, f"a plugin of kind {field.kind} is needed; give its name"
                )
            givens = givens[nulls[-1] + 1 :]
        if shape == "plugin":
            return self._plugin(field, inner, givens, path, optional=optional)
        if shape == "section":
            return self._section(inner, givens, path)
        if shape == "list":
            return self._list(inner, field, givens, path)
        return self._dict(inner, field, givens, path)

    def _plugin(
        self, field: Field, base: type, givens: list[Given], path: KeyPath, *, optional: bool
    ) -> Any:
        """Narrow to the selected plugin's class, and drop what a plugin chosen earlier left behind."""
        mappings = [done for given in givens if (done := self._spelt_out(given, base, path))]
        default = None if field.collection else field.plugin_default
        if optional and not mappings and default is None:
            return None
        kind = str(field.kind)
        choice = select(kind, mappings, path, default=default)
        self.problems.extend(choice.problems)
        self.origins.update({(*path, key): origin for key, origin in choice.origins.items()})
        found = None if choice.problems else self._config_class(kind, base, choice, mappings, path)
        cls = found or base
        since = (given.value for given in mappings if given.layer.rank >= choice.fresh_since)
        renewed = {key for keys in since for key in keys}
        rest = [
            Given(
                self._known_keys(given, cls, choice, path, renewed, judged=bool(found)),
                given.layer,
            )
            for given in mappings
        ]
        merged = self._section(cls, rest, path)
        merged.update(choice.keys)
        return merged

    def _spelt_out(self, given: Given, base: type, path: KeyPath) -> Given | None:
        """A bare string as `{name: …}`, with the selectors' interpolations resolved."""
        value = {"name": given.value} if isinstance(given.value, str) else given.value
        if not is_mapping(value):
            self._problem(given, path, f"expected a plugin's name or {describe(base)}")
            return None
        value = dict(value)
        for key in SELECTORS:
            if key in value:
                ready = self._ready(Given(value[key], given.layer), (*path, key), None)
                value[key] = ready.value if ready else None
        return Given(value, given.layer)

    def _config_class(
        self, kind: str, base: type, choice: Choice, mappings: Sequence[Given], path: KeyPath
    ) -> type | None:
        raw: dict[str, Any] = dict(choice.keys)
        for given in mappings:
            raw.update((key, value) for key, value in given.value.items() if key not in SELECTORS)
        try:
            cls = self._resolver(kind, raw)
            if issubclass(cls, base):
                fields_of(cls)
                return cls
            text = f"its Config, {cls.__module__}.{cls.__qualname__}, does not extend {base.__qualname__}"
        except DovetailError as error:
            text = str(error)
        except NameError as error:
            text = f"its Config has an annotation that can't be resolved: {error}"
        selector = "path" if "path" in choice.keys else "name"
        problem = Problem(
            path=(*path, selector),
            value=choice.keys[selector],
            origin=choice.origins[selector],
            text=text,
        )
        self.problems.append(problem)
        return None

    def _known_keys(
        self,
        given: Given,
        cls: type,
        choice: Choice,
        path: KeyPath,
        renewed: Collection[str],
        *,
        judged: bool,
    ) -> dict[str, Any]:
        """What the class knows of a contribution; of layers since the plugin was chosen, everything.

        Where the plugin was not found, nobody can judge the keys that its base does not know. What a preset
        wrote for another plugin goes without a word, known or not: its values mean nothing to this one. Where
        it is the preset that chooses another plugin, what earlier layers wrote goes, known or not: it stands for
        a published combination, in which values meant for another plugin have no part. Nothing is said of keys that
        a layer gives anew (`renewed`), nor of values that are the plugin's default anyway.
        """
        if given.layer.is_preset and not choice.follows_preset:
            return {}
        kept: dict[str, Any] = {}
        for key, value in given.value.items():
            if key in SELECTORS:
                continue
            where = (*path, key)
            known = fields_of(cls).get(key)
            earlier = judged and given.layer.rank < choice.since
            if known and not (judged and given.layer.rank < choice.fresh_since):
                kept[key] = value
            elif known and (key in renewed or value == known.default()):
                continue
            elif earlier:
                why = "stands for a combination without it" if known else "has no such key"
                text = f"dropped: {choice.description} {why}"
                dropped = Problem(path=where, value=value, origin=given.layer.at(where), text=text)
                self.warnings.append(str(dropped))
            elif judged:
                kept[key] = value
            elif advice := key_advice(where, value):
                self._problem(Given(value, given.layer), where, advice)
        return kept

    def _list(self, tp: Any, field: Field, givens: list[Given], path: KeyPath) -> Any:
        slots: list[list[Given]] = [[Given(entry, _DEFAULTS)] for entry in default_entries(field)]
        for given in givens:
            value = given.value
            if isinstance(value, str) and field.one_or_many:
                value = [value]
            if isinstance(value, ByIndex):
                self._set_entries(slots, value, given, path)
            elif isinstance(value, (list, tuple)):
                slots = [[Given(entry, given.layer)] for entry in value]
                self.origins[path] = given.layer.at(path)
            else:
                return self._kept(given, path, field)
        element = element_types(tp)
        return [
            self._value(element(index), field, slot, (*path, index))
            for index, slot in enumerate(slots)
        ]

    def _set_entries(
        self, slots: list[list[Given]], changes: ByIndex, given: Given, path: KeyPath
    ) -> None:
        for index, value in changes.items():
            if index < len(slots):
                slots[index].append(Given(value, given.layer))
            elif index == len(slots):
                slots.append([Given(value, given.layer)])
            else:
                held = "1 entry" if len(slots) == 1 else f"{len(slots)} entries"
                self._problem(
                    Given(ABSENT, given.layer),
                    (*path, index),
                    f"the list has {held}; the next free index is [{len(slots)}]",
                )

    def _dict(self, tp: Any, field: Field, givens: list[Given], path: KeyPath) -> Any:
        by_key: dict[str, list[Given]] = {}
        for given in givens:
            if not is_mapping(given.value):
                return self._kept(given, path, field)
            self.origins.setdefault(path, given.layer.at(path))
            for key, value in given.value.items():
                by_key.setdefault(key, []).append(Given(value, given.layer))
        value_type = typing.get_args(tp)[1] if typing.get_args(tp) else Any
        return {
            key: self._value(value_type, field, entries, (*path, key))
            for key, entries in by_key.items()
        }

    def _kept(self, given: Given, path: KeyPath, field: Field | None = None) -> Any:
        """A value as it stands, or the raw text of an override where the field is verbatim."""
        value, raw = given.value, given.layer.raw
        verbatim = field is not None and field.verbatim
        if verbatim and raw is not None and not isinstance(value, (str, list, type(None))):
            given = Given(raw, given.layer)
        ready = self._ready(given, path, field)
        if ready is None:
            return ABSENT
        if isinstance(ready.value, ByIndex):
            self._problem(Given(ABSENT, given.layer), path, "is no list: no index can be set")
            return ABSENT
        origin = given.layer.at(path)
        self.origins[path] = origin
        for leaf, _ in leaves(given.value, path):
            self.origins[leaf] = given.layer.at(leaf)
        return ready.value

    def _ready(self, given: Given, path: KeyPath, field: Field | None) -> Given | None:
        """The value with its interpolations resolved; None where that fails."""
        value = given.value
        if isinstance(value, NotYaml):
            raw = given.layer.raw
            self._problem(
                Given(raw, given.layer), path, f"not YAML: {value.reason}; quote the value"
            )
            return None
        verbatim = field is not None and field.verbatim
        if self._interpolate is None or verbatim or not (isinstance(value, str) and "${" in value):
            return given
        try:
            return Given(self._interpolate(value, path), given.layer)
        except ValueError as error:
            self._problem(given, path, str(error))
            return None

    def _problem(self, given: Given, path: KeyPath, text: str) -> None:
        self.problems.append(
            Problem(path=path, value=given.value, text=text, origin=given.layer.at(path))
        )
