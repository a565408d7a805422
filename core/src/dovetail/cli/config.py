"""`dovetail config show|explain`: a config's resolved values, and the description of a key."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from dovetail.cli import render
from dovetail.cli.render import config_arguments

if TYPE_CHECKING:
    from dovetail.config.explain import Explanation
    from dovetail.config.load import LoadedConfig


@click.group()
def config() -> None:
    """Show and explain configs."""


@config.command()
@config_arguments()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(config: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the resolved CONFIG as YAML, defaults included, with a comment on the origin of each value that is not a default.

    A plugin in a Python file is not imported, so the defaults of its own settings are not shown.
    """
    from dovetail.config.explain import annotated_yaml
    from dovetail.config.load import config_class_unrun, load_config
    from dovetail.config.serialise import to_mapping

    loaded = load_config(config, overrides, resolver=config_class_unrun)
    for warning in loaded.warnings:
        render.warning(warning)
    if as_json:
        render.dump_json(to_mapping(loaded.config))
    else:
        render.line(annotated_yaml(loaded), nl=False)


@config.command()
@config_arguments("[CONFIG] [KEY]... [KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(config: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the value, origin, type and meaning of each KEY; without KEY, the value and origin of every key."""
    from dovetail.config.explain import explain as explain_key
    from dovetail.config.load import load_config

    keys = [text for text in overrides if "=" not in text]
    given = [text for text in overrides if "=" in text]
    loaded = load_config(config, given, partial=True)
    for warning in loaded.warnings:
        render.warning(warning)
    if not keys:
        _list(loaded, None, as_json=as_json)
        return
    explanations = [explain_key(loaded, key) for key in keys]
    if as_json:
        import attrs

        one, *others = [attrs.asdict(explanation) for explanation in explanations]
        render.dump_json({"schema": 1, **({"explanations": [one, *others]} if others else one)})
        return
    for number, explanation in enumerate(explanations):
        if number:
            render.line()
        _print(explanation)
        if explanation.keys:
            render.line()
            _list(loaded, explanation.key, as_json=False)


def _list(loaded: LoadedConfig, below: str | None, *, as_json: bool) -> None:
    from dovetail.config.explain import all_keys

    rows = list(all_keys(loaded, below))
    if as_json:
        keys = [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
        render.dump_json({"schema": 1, "keys": keys})
    else:
        render.table(
            ("KEY", "VALUE", "FROM"), ((key, _shown(v), origin) for key, v, origin in rows)
        )


def _print(explanation: Explanation) -> None:
    pairs = [("key", explanation.key)]
    if not explanation.keys:
        pairs.append(("value", _shown(explanation.value)))
    pairs.append(("from", explanation.origin))
    if explanation.preset:
        pairs.append(("in place of", explanation.preset))
    pairs.append(("type", explanation.type))
    if explanation.allowed:
        pairs.append(("allowed", explanation.allowed))
    if not explanation.keys:
        default = (
            "none: it has to be given" if explanation.required else _shown(explanation.default)
        )
        pairs.append(("default", default))
    pairs.append(("meaning", textwrap.fill(explanation.doc, 90)))
    render.fields(pairs)


def _shown(value: object) -> str:
    from dovetail.config.problems import show_value

    return show_value(value, limit=60)
