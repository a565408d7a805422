"""Messages for faults found while structuring: unknown and missing keys, wrong types, broken bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from cattrs.errors import ForbiddenExtraKeysError, StructureHandlerNotFoundError

from dovetail.config.aliases import key_advice, value_advice
from dovetail.config.keys import ABSENT, KeyPath, format_path, leaves, value_at
from dovetail.config.merge import SectionDict
from dovetail.config.mismatch import MismatchError
from dovetail.config.problems import ConfigProblem
from dovetail.config.schema import fields_of
from dovetail.config.structure import StructureFault
from dovetail.errors import DovetailError, nearest
from dovetail.sections.agent_loop import EpisodeSection
from dovetail.sections.fields import PluginSection

Origins = Mapping[KeyPath, str]
"""The layer that gave a key, by key path."""

_ATTRS_MESSAGE = re.compile(r"'\w+' must be (?P<bound>.+?): .*", re.DOTALL)
_LINE = re.compile(r":\d+$")
"""The line in a file, at the end of an origin."""
_UNKNOWN = "unknown key"
_FEW = 3
"""Maximum number of items of a kind in a message: other places where an unknown key exists, or layers that gave a key."""


def problems_of(
    fault: StructureFault, tree: SectionDict, origins: Origins
) -> Iterator[ConfigProblem]:
    """Yield the config problems that a fault, an exception from building the config, stands for.

    Each unknown key is one problem. For an unknown section of another training system, each key in the section is one problem.
    """
    if isinstance(fault.error, ForbiddenExtraKeysError):
        yield from _unknown_keys(fault.path, fault.error, tree, origins)
        return
    value = value_at(tree, fault.path)
    yield ConfigProblem(
        path=fault.path,
        value=ABSENT if isinstance(value, Mapping) else value,
        origin=origin_of(origins, fault.path) if value is not ABSENT else None,
        text=_text(fault, value),
    )


def origin_of(origins: Origins, path: KeyPath) -> str | None:
    """Return the layer that gave a key, or else the layer that gave the closest enclosing container."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None


def _text(fault: StructureFault, value: object) -> str:
    error = fault.error
    if isinstance(error, KeyError) and value is ABSENT:
        return "required, but no file or override gives it"
    if isinstance(error, MismatchError):
        advice = value_advice(fault.path, value)
        return f"{str(error).partition('; did you mean')[0]}; {advice}" if advice else str(error)
    if isinstance(error, StructureHandlerNotFoundError):
        return f"the section's class declares the type {error.type_!r}, which a config can't hold"
    if isinstance(error, DovetailError):
        return str(error)
    message = str(error.args[0]) if error.args else type(error).__name__
    if match := _ATTRS_MESSAGE.fullmatch(message):
        return f"must be {match['bound']}"
    return message


def _unknown_keys(
    section: KeyPath, error: ForbiddenExtraKeysError, tree: SectionDict, origins: Origins
) -> Iterator[ConfigProblem]:
    """Yield a problem for each key that a section's class lacks; the first one lists the known keys."""
    owner = value_at(tree, (*section, "name")) if section else ABSENT
    whose = f"{format_path(section)} {owner!r}" if isinstance(owner, str) else format_path(section)
    whose = whose or "a config"
    known = f"{whose} has {', '.join(sorted(fields_of(error.cl)))}"
    for key in sorted(error.extra_fields):
        for problem in _unknown((*section, key), error.cl, tree, origins):
            if problem.text == _UNKNOWN:
                yield attrs.evolve(problem, text=f"{_UNKNOWN}; {known}")
                known = f"the keys of {whose} are listed above"
            else:
                yield problem


def _unknown(
    path: KeyPath, cls: type, tree: SectionDict, origins: Origins
) -> Iterator[ConfigProblem]:
    """Yield one problem for an unknown key.

    If the key is a section with keys of other training systems, yield one for each key that `_unknown_values` returns instead.
    """
    value = value_at(tree, path)
    words = cls.unsupported_keys if issubclass(cls, PluginSection) else {}
    told, text = [(path, value)], _nearest_key(path, cls, tree)
    if own := words.get(str(path[-1])):
        text = f"{_UNKNOWN}; {own}"
    elif any(key_advice(key, given) for key, given in leaves(value, path, lists=False)):
        told, text = list(_unknown_values(value, path)), f"{_UNKNOWN}; Dovetail has no key of that name"  # fmt: skip
    elif _limit_of_loop(path, tree):
        text = f"{_UNKNOWN}; limits of episodes belong to dovetail.sections.EpisodeSection: let the Config of the agent loop extend this class"
    elif owners := _plugins_with(path, tree):
        text = f"{_UNKNOWN}; another plugin has this key: set {format_path(path[:-1])}.name={' or '.join(owners)}"
    for key, given in told:
        yield ConfigProblem(
            path=key,
            value=ABSENT if isinstance(given, Mapping) and given else given,
            origin=_givers(given, key, origins),
            text=(text if own else key_advice(key, given)) or text,
        )


def _limit_of_loop(path: KeyPath, tree: SectionDict) -> bool:
    """Return whether an unknown key is a limit of episodes (`EpisodeSection`) in the section of an agent loop of several turns.

    The loop then lacks the limits because its Config does not extend `EpisodeSection`, as the message says.
    """
    name, file = (value_at(tree, (*path[:-1], key)) for key in ("name", "path"))
    of_many_turns = file is not ABSENT or name not in (ABSENT, None, "single_turn")
    return (
        of_many_turns and path[-2:-1] == ("agent_loop",) and path[-1] in fields_of(EpisodeSection)
    )


def _plugins_with(path: KeyPath, tree: SectionDict) -> list[str]:
    """Return the installed plugins of the section's kind whose configs have a key that the section's plugin lacks.

    Empty if the section selects a file of the user, which another plugin does not replace.
    """
    from dovetail.plugins.index import default_index

    if value_at(tree, (*path[:-1], "path")) is not ABSENT:
        return []
    holder = value_at(tree, path[:-2])
    section, key = path[-2:] if len(path) > 1 else ("", path[0])
    if not isinstance(holder, SectionDict) or not (
        field := fields_of(holder.cls).get(str(section))
    ):
        return []
    return [
        entry.name
        for entry in (default_index().entries(field.kind) if field.kind else ())
        if entry.manifest is not None
        and any(
            own["name"] == key for own in (entry.manifest.config_schema or {}).get("fields", ())
        )
    ]


def _unknown_values(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Divide an unknown section into the keys that get a problem each, and yield each of them with its value.

    A section below it is one such key if none of its keys is known from other training systems; otherwise it is divided too.
    """
    below = list(leaves(value, path, lists=False))
    known_elsewhere = any(key_advice(key, given) for key, given in below)
    if not isinstance(value, Mapping) or len(below) == 1 or not known_elsewhere:
        yield from below if len(below) == 1 else [(path, value)]
        return
    for key, child in value.items():
        yield from _unknown_values(child, (*path, key))


def _givers(value: object, path: KeyPath, origins: Origins) -> str | None:
    """Return the layers that gave a key or keys below it, as text; a file is named with the line of the first key that it gave."""
    layers: dict[str, str] = {}
    for key, _ in leaves(value, path, lists=False):
        origin = origin_of(origins, key) or ""
        layers.setdefault(_LINE.sub("", origin), origin)
    if len(layers) <= 1:
        return origin_of(origins, path)
    more = [f"and {len(layers) - _FEW} more"] if len(layers) > _FEW else []
    return ", ".join([*list(layers.values())[:_FEW], *more])


def _nearest_key(path: KeyPath, cls: type, tree: SectionDict) -> str:
    """Return the text of an unknown key's problem, with the key that was probably meant, if there is one."""
    key, section = str(path[-1]), path[:-1]
    close = nearest(key, fields_of(cls))
    elsewhere = [found for found in key_paths(tree) if found[-1] == key]
    # The same key in another section is likelier meant than a similar key in this one. Exceptions: the key is in many sections,
    # as `name` is, or it is part of the similar key, as `every` is of `save_every`.
    if close and (key in close or not 0 < len(elsewhere) <= _FEW):
        elsewhere = [(*section, close)]
    places = " or ".join(format_path(found) for found in elsewhere)
    return f"{_UNKNOWN}; did you mean {places}?" if places else _UNKNOWN


def key_paths(tree: SectionDict, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key that the sections of a merged tree could hold; `path` is the path of the tree."""
    for name in fields_of(tree.cls):
        yield (*path, name)
        child = tree.get(name)
        if isinstance(child, SectionDict):
            yield from key_paths(child, (*path, name))
