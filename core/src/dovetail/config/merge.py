"""Layers become one tree: later values win, shorthands are spelt out, plugin sections know their class.

The schema steers the merge: it says where a bare string names a plugin, which lists overrides may index, and which
keys a newly chosen plugin does not know.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from dovetail.config.advice import section_advice
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
from dovetail.config.narrow import narrow
from dovetail.config.overrides import NotYaml
from dovetail.config.problems import ABSENT, Problem
from dovetail.config.schema import Field, describe, fields_of, without_none
from dovetail.config.selection import SELECTORS, Resolver, select
from dovetail.config.serialise import given_values
from dovetail.config.shapes import always_there, default_entries, element_types, shape_of

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
            merged[key] = self._unknown(unknown, (*path, key))
        return merged

    def _unknown(self, givens: Sequence[Given], path: KeyPath) -> Any:
        """What the layers give for a key that the class does not know, all of it and as it stands: it is told of, not used."""
        self.origins[path] = givens[-1].layer.at(path)
        if not all(isinstance(given.value, Mapping) for given in givens):
            value, raw = givens[-1].value, givens[-1].layer.raw
            for leaf, _ in leaves(value, path):
                self.origins[leaf] = givens[-1].layer.at(leaf)
            return raw if isinstance(value, NotYaml) else value
        by_key: dict[Any, list[Given]] = {}
        for given in givens:
            for key, value in given.value.items():
                by_key.setdefault(key, []).append(Given(value, given.layer))
        return {key: self._unknown(entries, (*path, key)) for key, entries in by_key.items()}

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
        if inner is Any:
            # A list or a mapping replaces what is something else in a lower layer.
            others = [i for i, given in enumerate(givens) if shape_of(Any, field, [given]) != shape]
            givens = givens[others[-1] + 1 :] if others else givens
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
        """The section of the plugin that the layers choose; None where they need not choose one."""
        mappings = [done for given in givens if (done := self._spelt_out(given, base, path))]
        default = None if field.collection else field.plugin_default
        if optional and not mappings and default is None:
            return None
        kind = str(field.kind)
        choice = select(kind, mappings, path, default=default)
        self.origins.update({(*path, key): origin for key, origin in choice.origins.items()})
        narrowed = narrow(choice, mappings, path, kind=kind, base=base, resolver=self._resolver)
        self.problems.extend(narrowed.problems)
        self.warnings.extend(narrowed.warnings)
        merged = self._section(narrowed.cls, narrowed.givens, path)
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
