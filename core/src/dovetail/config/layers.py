"""Layers: what each file or override contributes to a config, and the line of every key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.config.keys import GIVEN, KeyPath, parse_path, selection
from dovetail.config.plain_yaml import YamlTextError, parse
from dovetail.errors import ConfigError, nearest

DEFAULT_LAYER = "default"
"""Origin in `provenance` of a value that no layer gives."""
DEFAULT_RANK = -1
"""Rank of the fields' defaults; the first given layer has rank 0."""


class ByIndex(dict[int, Any]):
    """Overrides of single entries of a list, by index."""


@attrs.frozen(kw_only=True)
class ConfigLayer:
    """One layer of a config: the values of one file, override or preset. Later layers override earlier ones."""

    rank: int
    """Position of the layer; layers given together, such as all overrides, have the same rank."""
    name: str
    """Name in messages: a file's path, `override #2 'rollout.n=4'`, or `preset 'dapo'`."""
    tree: Mapping[str, Any]
    """The layer's values as plain containers; overrides of list entries are `ByIndex`."""
    lines: Mapping[KeyPath, int] = attrs.field(factory=dict, repr=False)
    """Line (from 1) of each key path, for files."""
    is_preset: bool = False
    """Whether the layer holds a preset's settings."""
    raw: Mapping[KeyPath, str] = attrs.field(factory=dict)
    """Unparsed value of an override, by key path. A field whose text is kept as written (`Field.verbatim`) takes this text if the parsed
    value is not a string."""

    def at(self, path: KeyPath) -> str:
        """Return the origin of a key in this layer: the layer's name, with the line if known."""
        for length in range(len(path), 0, -1):
            if (line := self.lines.get(path[:length])) is not None:
                return f"{self.name}:{line}"
        return self.name

    def given(self) -> dict[str, Any]:
        """Return the values that the user set, with their nesting, from the layer of a config that a run wrote.

        The key `given` of such a config lists the paths of the keys that the user set. All other values follow from these.
        """
        return selection(self.tree, map(parse_path, self.tree[GIVEN]))


@attrs.frozen
class Given:
    """The value that one layer gives for one key."""

    value: Any
    layer: ConfigLayer


def is_mapping(value: object) -> bool:
    """Return whether a value is a mapping of keys; False for overrides of a list's entries (`ByIndex`)."""
    return isinstance(value, Mapping) and not isinstance(value, ByIndex)


def read_file(path: str | os.PathLike[str], rank: int = 0) -> ConfigLayer:
    """Read a YAML file as a layer.

    Raises:
        ConfigError: the file can't be read, is empty, or is no YAML mapping.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config file {file} does not exist", hint=_similar(file)) from None
    except IsADirectoryError:
        inside = file / "config.yaml"
        hint = f"give the file in it: {inside}" if inside.is_file() else "give a YAML file"
        raise ConfigError(f"config file {file} is a directory", hint=hint) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {file} is not UTF-8 text: byte {error.start} can't be decoded",
            hint="save the file as UTF-8 text",
        ) from None
    except OSError as error:
        raise ConfigError(f"config file {file} can't be read: {error.strerror}") from error
    try:
        tree, lines = parse(text)
    except YamlTextError as error:
        where = f", line {error.line}" if error.line else ""
        raise ConfigError(
            f"config file {file}{where} is not YAML that a config can hold: {error}",
            hint=error.hint,
        ) from None
    if tree is None:
        raise ConfigError(
            f"config file {file} is empty",
            hint="name at least the model: `model: {path: <directory or hub id>}`",
        )
    if not isinstance(tree, dict):
        held = "a list" if isinstance(tree, list) else f"the single value {tree!r}"
        raise ConfigError(
            f"config file {file} holds {held} at its top level; expected a mapping of sections",
            hint="start with sections such as `model:`, `data:` and `rollout:`",
        )
    return ConfigLayer(rank=rank, name=str(file), tree=tree, lines=lines)


def _similar(file: Path) -> str:
    """Return advice on a missing file: the most similar name in its folder, if any."""
    if not file.parent.is_dir():
        return f"the directory {file.parent} does not exist either"
    names = [p.name for p in file.parent.iterdir() if p.suffix in {".yaml", ".yml"}]
    close = nearest(file.name, names)
    return f"did you mean {file.parent / close}?" if close else "check the path"
