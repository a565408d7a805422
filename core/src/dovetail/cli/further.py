"""Commands of packages, found by their entry points: listed from their source, imported when they are used."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NoReturn

import click

from dovetail.errors import PluginBrokenError, PluginConflictError, nearest


def further_commands(group: str, own: Collection[str]) -> dict[str, list[tuple[EntryPoint, str]]]:
    """Return the commands that packages add: name → every entry point of the group that claims it, with its owner. Commands named in `own`
    are left out.
    """
    from dovetail.plugins.index import default_index

    found: dict[str, list[tuple[EntryPoint, str]]] = {}
    for entry_point, distribution in default_index().extensions(group):
        if entry_point.name not in own:
            owner = f"{distribution.name} {distribution.version}"
            found.setdefault(entry_point.name, []).append((entry_point, owner))
    return found


def load_command(name: str, claims: Sequence[tuple[EntryPoint, str]]) -> click.Command | None:
    """Import a command of a package; None where nothing claims it.

    Raises:
        PluginConflictError: several packages claim the name.
        PluginBrokenError: it can't be imported, or is not a command.
    """
    if not claims:
        return None
    if len(claims) > 1:
        raise PluginConflictError(
            f"the command {name!r} comes from {' and '.join(owner for _, owner in claims)}",
            hint="uninstall all but one",
        )
    entry_point, owner = claims[0]
    try:
        command = entry_point.load()
    except (Exception, SystemExit) as failure:
        raise PluginBrokenError(
            f"the command {name!r} of {owner} can't be imported: {type(failure).__name__}: {failure}",
            hint=f"report it to the author of {owner.split()[0]}, or uninstall it",
        ) from failure
    if not isinstance(command, click.Command):
        raise PluginBrokenError(
            f"the command {name!r} of {owner} is {command!r}, not a click command",
            hint="its author points the entry point at a click command or group",
        )
    return command


def fail_unknown(ctx: click.Context, name: str, known: Collection[str]) -> NoReturn:
    """Exit with the command that installs an unknown command's package, or with the nearest known command."""
    from dovetail.plugins.catalogue import COMMANDS

    parent = ctx.command_path.partition(" ")[2]
    if home := COMMANDS.get(f"{parent} {name}".strip()):
        ctx.fail(f"there is no command {name!r}; it comes with: pip install {home}")
    near = nearest(name, known)
    ctx.fail(
        f"there is no command {name!r}"
        + (f"; did you mean {near!r}?" if near else f"; `{ctx.command_path} --help` lists them")
    )


def described(further: Mapping[str, Sequence[tuple[EntryPoint, str]]]) -> list[tuple[str, str]]:
    """Return the commands' names, each with its description and its package."""
    found = []
    for name, claims in sorted(further.items()):
        owners = f"From {' and '.join(owner for _, owner in claims)}."
        found.append((name, f"{about(claims[0][0])} {owners}".strip()))
    return found


def about(entry_point: EntryPoint) -> str:
    """Return the first sentence of a command's docstring; empty where it has none or its source can't be read."""
    package, _, inside = entry_point.module.partition(".")
    try:
        spec = importlib.util.find_spec(package)
        places = (spec and spec.submodule_search_locations) or []
        path = Path(places[0]).joinpath(*inside.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(file.read_text("utf-8"))
    except (ImportError, IndexError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr:
            text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            return text.partition(". ")[0].removesuffix(".") + "." if text else ""
    return ""
