"""Composes verl's configs from their defaults lists, as Hydra does: from verl's own files, kept as tables, and the user's files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import yaml

from dovetail.errors import ConfigError, nearest

VERSIONS = ("0.9.1", "0.8.0")
"""Versions of verl with tables in this package, newest first."""


@functools.cache
def verl_files(version: str) -> Mapping[str, Any]:
    """Return the parsed config files of a version of verl by name, such as `actor/dp_actor`."""
    path = files("dovetail_migrate.verl") / "tables" / f"verl-{version}.json"
    return json.loads(path.read_text("utf-8"))


@functools.cache
def key_tables() -> dict[str, Any]:
    """Return the tables that translate verl's keys and values, with compiled patterns."""
    path = files("dovetail_migrate.verl") / "tables" / "keys.yaml"
    found = yaml.safe_load(path.read_text("utf-8"))
    for name in ("needless", "missing", "changed", "spellings", "finetuning"):
        found[name] = [(re.compile(pattern), text) for pattern, text in found[name]]
    return found


def table(name: str) -> dict[str, Any]:
    """Return the table of this name, such as `losses`, which maps verl's values to Dovetail's."""
    return key_tables()["names"][name]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that reads `1e-6` as a number, as OmegaConf does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?|\.(inf|nan))"),
    list("-+0123456789."),
)  # fmt: skip


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigError: the file is missing, or contains no mapping.
    """
    try:
        text = path.read_text("utf-8")
        tree = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"the file {path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {path} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"the file {path} contains a {type(tree).__name__}; expected a mapping of verl's keys"
        )
    if (line := re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)) is not None:
        tree["# @package"] = line[1]
    return without_targets(tree)


def without_targets(tree: Any) -> Any:
    """Return a config tree without `_target_` keys, which name verl's classes and are not settings."""
    if isinstance(tree, dict):
        return {key: without_targets(value) for key, value in tree.items() if key != "_target_"}
    return tree


@attrs.define
class Composer:
    """Composes one config from a defaults list and the files that the list names, as Hydra does.

    Args:
        version: the verl version whose files a user's config may name.
        folder: the folder that is searched before verl's files.
        choices: the option that the command chose for each config group, such as `{model_engine: megatron}`.
    """

    version: str
    folder: Path | None = None
    choices: dict[str, str] = attrs.field(factory=dict)
    used_choices: set[str] = attrs.field(factory=set)
    read: list[str] = attrs.field(factory=list)
    """Names of the files that were read, each file before the files that it includes."""
    own: dict[str, Any] = attrs.field(factory=dict)
    """Values from the files in `folder`, by key."""

    def compose(self, name: str) -> dict[str, Any]:
        """Compose the config of this name, without `defaults` and with unresolved interpolations.

        Raises:
            ConfigError: a file that the config names is missing.
        """
        self._find_overrides(name)
        tree: dict[str, Any] = {}
        self._add(tree, name, package="")
        return tree

    def _find_overrides(self, name: str) -> None:
        """Collect the entries `override group: option` of all defaults lists, before the config is composed.

        An option that the command chose takes precedence, then the entry of the outermost file.
        """
        entries = self._file(name).get("defaults", ())
        for entry in entries:
            for key, option in entry.items() if isinstance(entry, dict) else ():
                if key.startswith("override "):
                    group = key.removeprefix("override ").partition("@")[0].strip()
                    self.choices.setdefault(group, option)
        for entry in entries:
            if isinstance(entry, str) and entry != "_self_":
                self._find_overrides(entry)

    def _add(self, tree: dict[str, Any], name: str, package: str) -> None:
        self.read.append(name)
        source = dict(self._file(name))
        group = name.rpartition("/")[0]
        if source.pop("# @package", None) == "_global_":
            package = ""
        own = {key: value for key, value in source.items() if key not in ("defaults", "hydra")}
        if self.folder is not None and (self.folder / f"{name}.yaml").is_file():
            self.own |= dict(leaves(nested(package, own)))
        entries = source.get("defaults", [])
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            if entry == "_self_":
                merge(tree, nested(package, own))
            elif isinstance(entry, str):
                inner = f"{group}/{entry}" if group and not entry.startswith("/") else entry
                self._add(tree, inner.strip("/"), package)
            else:
                for key, option in entry.items():
                    if not key.startswith("override "):
                        self._add_option(tree, key, option, group, package)

    def _add_option(
        self, tree: dict[str, Any], key: str, option: Any, group: str, package: str
    ) -> None:
        path, _, at = key.removeprefix("optional ").partition("@")
        parts = (group.split("/") if group and not path.startswith("/") else []) + path.split("/")
        while ".." in parts:
            place = parts.index("..")
            del parts[max(place - 1, 0) : place + 1]
        chosen = "/".join(part for part in parts if part)
        self.used_choices.add(chosen)
        option = self.choices.setdefault(chosen, option)
        option = re.sub(r"\$\{(\w+)\}", lambda m: self.choices.get(m[1], m[0]), str(option))
        where = ".".join(part for part in (package, at or chosen.replace("/", ".")) if part)
        if option not in ("None", "null"):
            self._add(tree, f"{chosen}/{option}", where)

    def _file(self, name: str) -> Mapping[str, Any]:
        name = name.removesuffix(".yaml")
        if self.folder is not None and (own := self.folder / f"{name}.yaml").is_file():
            return read_yaml(own)
        known = verl_files(self.version)
        if name in known:
            return known[name]
        near = nearest(name, known)
        raise ConfigError(
            f"the config {name!r} was not found: it is not in {self.folder or 'the working directory'}, and verl {self.version} has no config of this name",
            hint=f"did you mean {near!r}?"
            if near
            else "name the config's folder: --config-path DIR",
        )


def nested(path: str, value: Any) -> dict[str, Any]:
    """Put a value below a dotted path, as nested mappings; an empty path gives the value itself."""
    for part in reversed(path.split(".") if path else []):
        value = {part: value}
    return value


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a tree with its dotted key, which begins with the path `above`; an empty mapping counts as a value."""
    for name, value in tree.items():
        key = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key)
        else:
            yield key, value


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Merge `above` into `below` recursively; values that are not mappings replace earlier values."""
    for key, value in above.items():
        if isinstance(value, Mapping):
            inner = below.get(key)
            below[key] = dict(inner) if isinstance(inner, Mapping) else {}
            merge(below[key], value)
        else:
            below[key] = value
