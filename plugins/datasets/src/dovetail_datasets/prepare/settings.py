"""Parses a command line's recipe (`NAME:ARGUMENT`) and settings (`KEY=VALUE`), and lists installed recipes without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import cattrs
import yaml

from dovetail.errors import ConfigError, nearest
from dovetail.interfaces import PluginContext
from dovetail.plugins import load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_datasets.prepare.recipe import DataRecipe, RecipeSection

KIND = "data_recipe"
_CONVERTER = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)


def recipe_named(text: str, overrides: Sequence[str]) -> DataRecipe:
    """Return a recipe with its settings.

    Args:
        text: `NAME` or `NAME:ARGUMENT`.
        overrides: settings `key=value` for the recipe's config.

    Raises:
        PluginError: there is no such recipe, or it can't be loaded; the message names the nearest.
        ConfigError: an argument is given to a recipe that takes none, a required one is missing, or a setting is wrong.
    """
    name, colon, argument = text.partition(":")
    ref = ref_for(KIND, PluginSection(name=name))
    cls: Any = load_plugin_class(ref)
    if colon and not cls.argument:
        raise ConfigError(
            f"the recipe {name!r} takes no argument after a colon, but {argument!r} is given",
            hint=f"write {name}",
        )
    settings = dict(map(_setting, overrides))
    if colon:
        settings[cls.argument] = argument
    recipe: Any = make_plugin(
        attrs.evolve(ref, config=_config(name, cls.Config, settings)), PluginContext()
    )
    return recipe


def _setting(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not a setting; expected KEY=VALUE",
            hint="write for example held_out=0.05",
        )
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def _config(name: str, cls: type[RecipeSection], settings: dict[str, Any]) -> RecipeSection:
    fields = attrs.fields_dict(cls).keys() - attrs.fields_dict(PluginSection).keys()
    for key in settings.keys() - fields:
        near = nearest(key, fields)
        raise ConfigError(
            f"the recipe {name!r} has no setting {key!r}; its settings: {', '.join(sorted(fields))}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    try:
        return _CONVERTER.structure({**settings, "name": name}, cls)
    except cattrs.BaseValidationError as error:
        problems = cattrs.transform_error(error, path=name, format_exception=_wording)
        raise ConfigError(
            "; ".join(problems),
            hint=f"`dovetail plugins show {KIND}/{name}` describes the settings",
        ) from error


def _wording(error: BaseException, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(map(repr, get_args(kind)))}"
    return f"expected {kind.__name__}: {error}" if isinstance(kind, type) else str(error)


def recipes() -> Iterator[tuple[str, str, str]]:
    """Yield name, distribution and the docstring's first line of every installed recipe, from the manifests: no recipe is imported."""
    for entry_point in sorted(importlib.metadata.entry_points(group=f"dovetail.{KIND}")):
        distribution = entry_point.dist.name if entry_point.dist else ""
        yield entry_point.name, distribution, _first_line(entry_point)


def _first_line(entry_point: importlib.metadata.EntryPoint) -> str:
    try:
        spec = importlib.util.find_spec(entry_point.module.partition(".")[0])
        [folder] = spec.submodule_search_locations if spec else ()  # type: ignore[misc]
        manifest = json.loads((Path(folder) / "dovetail-plugin.json").read_bytes())
        plugins = {
            plugin["name"]: plugin for plugin in manifest["plugins"] if plugin["kind"] == KIND
        }
        return str(plugins[entry_point.name]["doc"]).partition("\n")[0]
    except (ImportError, OSError, ValueError, TypeError, KeyError):
        return "the manifest of its package can't be read"
