"""Loading of files and overrides into a checked config, or one error that lists every problem."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs

from dovetail.config.checks import cross_field_problems
from dovetail.config.interpolate import Interpolator
from dovetail.config.keys import (
    ABSENT,
    GIVEN,
    KeyPath,
    format_path,
    leaves,
    parse_path,
    selection,
    value_at,
)
from dovetail.config.layers import DEFAULT_LAYER, DEFAULT_RANK, ConfigLayer, read_file
from dovetail.config.merge import Merger, SectionDict
from dovetail.config.overrides import read_overrides
from dovetail.config.plugin_choice import Resolver
from dovetail.config.presets import preset_layer, settings_of
from dovetail.config.problems import ConfigProblem, config_error, show_value
from dovetail.config.schema import fields_of, is_section
from dovetail.config.serialise import to_mapping
from dovetail.config.structure import structure
from dovetail.config.wording import origin_of, problems_of
from dovetail.errors import ConfigError
from dovetail.sections import EpisodeSection, RunConfig, TrainerSection
from dovetail.text import unencodable

_NO_MODEL = ConfigLayer(rank=DEFAULT_RANK, name="not given", tree={"model": {"path": ""}})


@attrs.frozen(kw_only=True)
class LoadedConfig:
    """A config, and the layer from which each value came."""

    config: RunConfig
    provenance: Mapping[str, str]
    """Layer that gave each value, by key path: `grpo.yaml:12`, `override #1 'rollout.n=4'`, `preset 'dapo'`,
    `default`."""
    origins: Mapping[KeyPath, str] = attrs.field(factory=dict, repr=False)
    """Layer of each key that a layer sets, by the key path as a tuple."""
    preset: ConfigLayer | None = attrs.field(default=None, repr=False)
    """Layer of the selected preset, including values that other layers override."""
    from_environment: Mapping[KeyPath, tuple[str, Any]] = attrs.field(factory=dict, repr=False)
    """Values that contain an environment variable: key path → (the text in the layer, the resolved value)."""
    given: tuple[str, ...] = ()
    """Key paths that files and overrides give, each list as a whole. Other values are defaults, or set by trainer and preset."""
    warnings: tuple[str, ...] = ()
    """Warnings, each a full sentence, about values dropped because a later layer selects another plugin, and about a preset's settings
    without effect."""


def load_config(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    overrides: Sequence[str] = (),
    *,
    resolver: Resolver | None = None,
    partial: bool = False,
) -> LoadedConfig:
    """Load a config from one or more YAML files (later files win) and `key=value` overrides.

    Args:
        path: the file or files; empty if overrides give every key. Paths inside a config are relative to the working directory.
        overrides: `key=value` strings such as `rollout.n=4`, `tracking[1].name=jsonl`, `rollout=vllm`; values are YAML.
        resolver: the function that finds a plugin's Config class; by default the index of installed plugins.
        partial: whether to accept a config without `model.path`, to explain its other keys.

    Raises:
        ConfigError: a file can't be read, or anything in the config is wrong; `problems` lists every problem.
    """
    single = isinstance(path, (str, os.PathLike))
    paths = [path] if single else list(path)  # type: ignore[arg-type]
    files = [read_file(file, rank) for rank, file in enumerate(paths)]  # type: ignore[arg-type]
    source = ", ".join(file.name for file in files) or "the command line"
    if partial:
        files.insert(0, _NO_MODEL)
    return _load(files, overrides, source, resolver)


def config_from_mapping(
    mapping: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    resolver: Resolver | None = None,
    name: str = "mapping",
) -> LoadedConfig:
    """Build a config from plain containers, such as `to_mapping` returns, and `key=value` overrides.

    `name` is the name of the config in errors.

    Raises:
        ConfigError: anything in the config is wrong; `problems` lists every problem.
    """
    layer = ConfigLayer(rank=0, name=name, tree=mapping)
    return _load([layer], overrides, name, resolver)


def installed_config_class(kind: str, raw_section: Mapping[str, Any]) -> type:
    """Return the Config class of an installed plugin, or of a plugin in a file."""
    from dovetail.plugins.load import config_class

    return config_class(kind, raw_section)


def config_class_unrun(kind: str, raw_section: Mapping[str, Any]) -> type:
    """Return the Config class of a plugin as `installed_config_class` does, without running a plugin's file.

    A plugin in a file gets a Config that accepts any key and has no defaults.
    """
    if raw_section.get("path") is None:
        return installed_config_class(kind, raw_section)
    return _open_config_class(kind, frozenset(raw_section))


@functools.cache
def _open_config_class(kind: str, keys: frozenset[str]) -> type:
    """Make a Config class of a kind that also accepts these keys, with any value."""
    from dovetail.plugins.index import default_index

    module, _, name = default_index().kind(kind).section.partition(":")
    base = getattr(importlib.import_module(module), name)
    own = {key: attrs.field(type=Any) for key in sorted(keys - fields_of(base).keys())}
    made = attrs.make_class(f"{name}OfFile", own, bases=(base,), frozen=True, kw_only=True)
    if kind == "preset":
        made.settings = lambda _: {}  # type: ignore[attr-defined]
    return made


def _load(
    files: Sequence[ConfigLayer],
    overrides: Sequence[str],
    source: str,
    resolver: Resolver | None,
    *,
    bringing: Sequence[str] = ("trainer", "rollout.agent_loop"),
) -> LoadedConfig:
    """Load a config from file layers and overrides.

    Args:
        files: the layers of the files; later ones win.
        overrides: `key=value` texts, which win over the files.
        source: the name of the files in messages.
        resolver: the function that finds a plugin's Config class.
        bringing: key paths of the sections whose `settings` may set other keys, as a layer below all others.
    """
    find = resolver or installed_config_class
    files = [_without_derived(file, find) if GIVEN in file.tree else file for file in files]
    override_layers, problems = read_overrides(overrides, rank=len(files))
    given = [*files, *override_layers]
    # Checked before plugins are looked up: such a text may be a plugin's path.
    raise_problems(source, _unusable_texts(given), {})
    preset, preset_problems = preset_layer(RunConfig, given, find)
    problems += preset_problems
    layers = preset.among(given) if preset else given
    interpolator = Interpolator(RunConfig, layers, find)
    merger = Merger(find, interpolator)
    tree = merger.merge(RunConfig, layers)
    config, faults = structure(tree)
    for number, key in enumerate(bringing if config is not None else ()):
        # The settings that a section brings depend on its own keys, so that the section must be built first.
        section = attrgetter(key)(config)
        if not isinstance(section, TrainerSection | EpisodeSection):
            continue
        name = f"{key.rpartition('.')[2]} '{section.name or section.attribute}'"
        try:
            settings = settings_of(section, name)
        except ValueError as error:
            settings = {}
            problems.append(ConfigProblem(path=tuple(key.split(".")), text=str(error)))
        if settings:
            below = ConfigLayer(rank=DEFAULT_RANK, name=name, tree=settings)
            left = bringing[number + 1 :]
            return _load([below, *files], overrides, source, resolver, bringing=left)
    problems += merger.problems
    for fault in faults:
        problems += problems_of(fault, tree, merger.origins)
    if preset:
        problems += preset.problems(structure(tree["algorithm"]["preset"])[0])
    problems += _cross_field(config, tree, [problem.path for problem in problems])
    raise_problems(source, problems, merger.origins)
    origin_by_leaf = {
        path: _origin(config, merger.origins, path) for path, _ in leaves(to_mapping(config))
    }
    brought = {layer.name for layer in layers if layer.is_preset or layer.rank == DEFAULT_RANK}
    given_keys = (
        format_path(tuple(itertools.takewhile(lambda key: isinstance(key, str), path)))
        for path, origin in origin_by_leaf.items()
        if origin not in brought | {DEFAULT_LAYER}
    )
    return LoadedConfig(
        config=config,
        provenance={format_path(path): origin for path, origin in origin_by_leaf.items()},
        origins=merger.origins,
        preset=preset.layer if preset else None,
        from_environment=interpolator.from_environment,
        given=tuple(dict.fromkeys(given_keys)),
        warnings=(*merger.warnings, *(preset.warnings(tree, merger.origins) if preset else ())),
    )


def _unusable_texts(layers: Iterable[ConfigLayer]) -> Iterator[ConfigProblem]:
    for layer in layers:
        surrogates = unencodable(layer.tree)
        zeros = (
            each for each in leaves(layer.tree) if isinstance(each[1], str) and "\0" in each[1]
        )
        for what, found in (("half of a surrogate pair", surrogates), ("the character NUL", zeros)):
            for path, text in found:
                yield ConfigProblem(
                    path=path,
                    value=text,
                    text=f"contains {what}, which no path, command or service accepts; remove it",
                    origin=layer.at(path),
                )


def _without_derived(layer: ConfigLayer, resolver: Resolver) -> ConfigLayer:
    """Remove the values that follow from others from a run's written config, so that they are derived again and follow overrides.

    A value is removed if loading the given values (the key `given` lists their paths) yields the same value, from a default, the trainer or
    the preset. A value that differs stays: it is an earlier version's default, or the user edited the file.

    Raises:
        ConfigError: `given` is not a list of key paths.
    """
    tree = {key: value for key, value in layer.tree.items() if key != GIVEN}
    keys = layer.tree[GIVEN]
    try:
        paths = dict.fromkeys(map(parse_path, keys if isinstance(keys, list) else [keys]))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{GIVEN} = {show_value(keys)} ({layer.at((GIVEN,))}): expected a list of key paths, such as [model.path]",
            hint=f"restore the value that the run wrote, or remove the key {GIVEN}: every key then counts as set by you, none as a default",
        ) from None
    while True:
        reduced = attrs.evolve(layer, tree=selection(tree, paths))
        try:
            derived = to_mapping(_load([reduced], (), layer.name, resolver).config)
        except ConfigError:
            return attrs.evolve(layer, tree=tree)  # loading it reports the error
        changed = {
            path: None
            for path, value in leaves(tree, lists=False)
            if value_at(derived, path) != value
        }
        if changed.keys() <= paths.keys():
            return reduced
        paths |= changed


def raise_problems(
    source: str, problems: Iterable[ConfigProblem], origins: Mapping[KeyPath, str]
) -> None:
    """Raise one error that lists every problem of the config named `source`; return if there is none.

    Raises:
        ConfigError: there are problems; the error gives the layer of each value.
    """
    located = [
        problem
        if problem.origin or problem.value is ABSENT
        else attrs.evolve(problem, origin=origin_of(origins, problem.path) or DEFAULT_LAYER)
        for problem in problems
    ]
    if located:
        raise config_error(source, located)


def _origin(config: RunConfig, origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Return the layer that gave a value, or else the layer that gave the closest list or mapping around it, within its section.

    The search goes no further than the section, since a layer that gives a list of sections does not give every key of each section.
    """
    value: Any = config
    section = 0
    for depth, key in enumerate(path):
        if is_section(type(value)):
            section = depth
            value = getattr(value, str(key))
        elif isinstance(value, (Mapping, list, tuple)):
            value = value[key]  # type: ignore[index]
    return next(
        (
            origins[path[:length]]
            for length in range(len(path), section, -1)
            if path[:length] in origins
        ),
        DEFAULT_LAYER,
    )


def _cross_field(config: Any, tree: SectionDict, wrong: Sequence[KeyPath]) -> list[ConfigProblem]:
    """Return cross-field problems that involve only values without a problem of their own."""
    if config is None:
        for path in wrong:
            _repair(tree, path)
        config, _ = structure(tree)
    if config is None:
        return []
    return [
        problem
        for problem in cross_field_problems(config)
        if not any(
            _overlap(touched, path)
            for touched in (problem.path, *problem.touches)
            for path in wrong
        )
    ]


def _repair(tree: SectionDict, path: KeyPath) -> None:
    """Remove a wrong value, or fill in a missing one, so that the other values can be checked."""
    section, keys = tree, list(path)
    while len(keys) > 1 and isinstance(child := section.get(str(keys[0])), SectionDict):
        section, keys = child, keys[1:]
    if keys:
        key = str(keys[0])
        field = fields_of(section.cls).get(key)
        if not isinstance(section.get(key), SectionDict):
            section.pop(key, None)
        if field and field.required and field.type is str:
            section[key] = "unknown"


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]
