"""Merging of layers into one tree: later values win, shorthands are expanded, plugin sections get their class.

The schema decides where a bare string names a plugin, which lists overrides may index, and which keys a newly
chosen plugin does not know.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from dovetail.config.aliases import value_advice
from dovetail.config.keys import ABSENT, KeyPath, leaves
from dovetail.config.layers import (
    DEFAULT_LAYER,
    DEFAULT_RANK,
    ByIndex,
    ConfigLayer,
    Given,
    is_mapping,
)
from dovetail.config.mismatch import mismatch
from dovetail.config.overrides import NotYaml
from dovetail.config.plugin_choice import Resolver, narrow
from dovetail.config.problems import ConfigProblem
from dovetail.config.schema import (
    Field,
    describe,
    entry_type,
    fields_of,
    is_section,
    without_none,
)
from dovetail.config.serialise import given_values
from dovetail.errors import DovetailError, PluginNotFoundError
from dovetail.sections.fields import SELECTORS

Interpolate = Callable[[str, KeyPath], Any]
"""Function of a string and its key path that resolves the string's `${…}`; raises ValueError if that fails."""

_DEFAULTS = ConfigLayer(rank=DEFAULT_RANK, name=DEFAULT_LAYER, tree={})


class SectionDict(dict[str, Any]):
    """The merged keys of a section, with the section's config class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls


class Merger:
    """Merges layers and collects every problem on the way.

    Attributes:
        problems: the problems found, in the order of the schema.
        warnings: warnings about dropped values, a full sentence each.
        origins: the layer of each key that a layer sets.
    """

    def __init__(self, resolver: Resolver, interpolate: Interpolate | None = None) -> None:
        self._resolver = resolver
        self._interpolate = interpolate
        self.problems: list[ConfigProblem] = []
        self.warnings: list[str] = []
        self.origins: dict[KeyPath, str] = {}

    def merge(self, cls: type, layers: Iterable[ConfigLayer]) -> SectionDict:
        """Return the merged tree of a config class; sections that no layer sets are empty."""
        return self._section(cls, [Given(layer.tree, layer) for layer in layers], ())

    def _section(self, cls: type, givens: Iterable[Given], path: KeyPath) -> SectionDict:
        merged = SectionDict(cls)
        mappings = []
        for given in givens:
            if is_mapping(given.value):
                mappings.append(given)
            else:
                advice = value_advice(path, given.value)
                text = str(mismatch(given.value, cls))
                self._problem(given, path, f"{text}; {advice}" if advice else text)
        by_key = _by_key(mappings)
        for field in fields_of(cls).values():
            value = self._field(field, by_key.pop(field.name, []), (*path, field.name))
            if value is not ABSENT:
                merged[field.name] = value
        for key, unknown in by_key.items():
            merged[key] = self._unknown(unknown, (*path, key))
        return merged

    def _unknown(self, givens: Sequence[Given], path: KeyPath) -> Any:
        """Return all that the layers give for a key that the class lacks, unresolved: only the error message needs it."""
        last = givens[-1]
        self.origins[path] = last.layer.at(path)
        if all(isinstance(given.value, Mapping) for given in givens):
            by_key = _by_key(givens)
            return {key: self._unknown(entries, (*path, key)) for key, entries in by_key.items()}
        for leaf, _ in leaves(last.value, path):
            self.origins[leaf] = last.layer.at(leaf)
        return last.layer.raw[path] if isinstance(last.value, NotYaml) else last.value

    def _field(self, field: Field, givens: list[Given], path: KeyPath) -> Any:
        default = field.default()
        if not givens and not _always_there(field, default):
            return ABSENT
        if default is not attrs.NOTHING and (base := given_values(default)):
            givens = [Given(base, _DEFAULTS), *givens]
        return self._value(field.type, field, givens, path)

    def _value(self, tp: object, field: Field, givens: list[Given], path: KeyPath) -> Any:
        inner, optional = without_none(tp)
        shape = _shape(inner, field, givens)
        if shape == "leaf":
            return self._kept(givens[-1], path, field)
        givens = [done for given in givens if (done := self._ready(given, path, field))]
        if givens and givens[-1].value is None:
            if optional or shape != "plugin":
                return self._kept(givens[-1], path, field)
            text = f"a plugin of kind {field.kind} is needed; give its name"
            self._problem(givens[-1], path, text)
        # Null replaces the values of lower layers, and so does a value of another shape if the type is Any.
        for index in range(len(givens) - 1, -1, -1):
            value = givens[index].value
            if value is None or (inner is Any and _shape(Any, field, [givens[index]]) != shape):
                givens = givens[index + 1 :]
                break
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
        """Merge the section of the plugin that the layers choose; None if the section is optional and no layer chooses one."""
        mappings = [done for given in givens if (done := self._spelt_out(given, base, path))]
        default = None if field.collection else field.plugin_default
        if optional and not mappings and default is None:
            return None
        narrowed = narrow(
            mappings,
            path,
            kind=str(field.kind),
            default=default,
            base=base,
            resolver=self._resolver,
        )
        self.origins.update({(*path, key): origin for key, origin in narrowed.origins.items()})
        self.problems.extend(narrowed.problems)
        self.warnings.extend(narrowed.warnings)
        merged = self._section(narrowed.cls, narrowed.givens, path)
        merged.update(narrowed.keys)
        return merged

    def _spelt_out(self, given: Given, base: type, path: KeyPath) -> Given | None:
        """Return a layer's section with a bare string expanded to `{name: …}`, and `${…}` resolved in the keys that select a plugin.

        None, with a problem recorded, if the value is neither a string nor a mapping.
        """
        value = {"name": given.value} if isinstance(given.value, str) else given.value
        if not is_mapping(value):
            self._problem(given, path, f"expected a plugin's name or {describe(base)}")
            return None
        value = dict(value)
        for key in value.keys() & set(SELECTORS):
            ready = self._ready(Given(value[key], given.layer), (*path, key), None)
            value[key] = ready.value if ready else None
        return Given(value, given.layer)

    def _list(self, tp: object, field: Field, givens: list[Given], path: KeyPath) -> Any:
        slots: list[list[Given]] = [[Given(entry, _DEFAULTS)] for entry in _default_entries(field)]
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
        if field.kind:
            slots = [slot for slot in slots if not self._is_absent_default(field.kind, slot)]
        return [
            self._value(entry_type(tp, index), field, slot, (*path, index))
            for index, slot in enumerate(slots)
        ]

    def _is_absent_default(self, kind: str, slot: Sequence[Given]) -> bool:
        """Return whether no layer gives this entry of a list of plugins, only the field's default, and the plugin is not installed."""
        if any(given.layer is not _DEFAULTS for given in slot):
            return False
        try:
            self._resolver(kind, slot[0].value)
        except PluginNotFoundError:
            return True
        except DovetailError:
            pass  # the plugin is installed; `narrow` reports what is wrong with it
        return False

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
                text = f"the list has {held}; the next free index is [{len(slots)}]"
                self._problem(Given(ABSENT, given.layer), (*path, index), text)

    def _dict(self, tp: object, field: Field, givens: list[Given], path: KeyPath) -> Any:
        for given in givens:
            if not is_mapping(given.value):
                return self._kept(given, path, field)
            self.origins.setdefault(path, given.layer.at(path))
        return {
            key: self._value(entry_type(tp), field, entries, (*path, key))
            for key, entries in _by_key(givens).items()
        }

    def _kept(self, given: Given, path: KeyPath, field: Field) -> Any:
        """Return one layer's value with `${…}` resolved, without merging; ABSENT, with a problem recorded, if the value is bad.

        If the field keeps text as written (`Field.verbatim`), and YAML parsed an override's value as a number or boolean, the unparsed
        text is the value.
        """
        raw = given.layer.raw.get(path)
        text = field.verbatim and without_none(field.type)[0] is str
        if text and raw and not isinstance(given.value, (str, list, type(None))):
            given = Given(raw, given.layer)
        ready = self._ready(given, path, field)
        if ready is None:
            return ABSENT
        if isinstance(ready.value, ByIndex):
            self._problem(
                Given(ABSENT, given.layer),
                path,
                "the value is not a list, so no entry can be set by index",
            )
            return ABSENT
        for key, _ in [(path, None), *leaves(given.value, path)]:
            self.origins[key] = given.layer.at(key)
        return ready.value

    def _ready(self, given: Given, path: KeyPath, field: Field | None) -> Given | None:
        """Return a layer's value with its `${…}` resolved; None, with a problem recorded, if that fails or the value is not YAML."""
        value = given.value
        if isinstance(value, NotYaml):
            text = f"not YAML: {value.reason}"
            self._problem(Given(given.layer.raw[path], given.layer), path, text)
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
        origin = given.layer.at(path)
        self.problems.append(ConfigProblem(path=path, value=given.value, text=text, origin=origin))


def _by_key(givens: Iterable[Given]) -> dict[Any, list[Given]]:
    """Return, for each key in the layers' mappings, the value that each layer gives for the key."""
    by_key: dict[Any, list[Given]] = {}
    for given in givens:
        for key, value in given.value.items():
            by_key.setdefault(key, []).append(Given(value, given.layer))
    return by_key


def _always_there(field: Field, default: object) -> bool:
    """Return whether a field that the config leaves out is built nevertheless, because it contains plugins or required keys."""
    inner, optional = without_none(field.type)
    if is_section(inner) and not field.kind:
        return default is not None and not (optional and default is attrs.NOTHING)
    return bool(field.kind) or (field.section is not None and bool(default))


def _default_entries(field: Field) -> list[Any]:
    """Return the default entries of a list, which an override can index if no layer gives the list."""
    if field.kind:
        return [{"name": name} for name in (field.plugin_default or "").split()]
    default = field.default()
    if not isinstance(default, (tuple, list)):
        return []
    return [given_values(entry) if is_section(type(entry)) else entry for entry in default]


def _shape(
    tp: object, field: Field, givens: Sequence[Given]
) -> Literal["plugin", "section", "list", "dict", "leaf"]:
    """Return how values of this type merge; if the type is Any, the last layer's value decides."""
    container = typing.get_origin(tp) or tp
    last = givens[-1].value if tp is Any and givens else None
    if is_section(tp):
        return "plugin" if field.kind else "section"
    if container in (tuple, list) or isinstance(last, (list, ByIndex)):
        return "list"
    if (isinstance(container, type) and issubclass(container, Mapping)) or is_mapping(last):
        return "dict"
    return "leaf"
