"""Commands that packages add by entry points. Their descriptions in lists are read from source; a command is imported when used."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn

import click

from dovetail.errors import PluginBrokenError, PluginConflictError, nearest


class ExtensibleGroup(click.Group):
    """A command group with commands of its own and commands that packages add by entry points. A command is imported when used.

    Args:
        group: the entry-point group in which packages declare commands.
        own: the group's own commands: name → (`module:attribute`, description for `--help`).
        attributes: attributes of `click.Group`.
    """

    def __init__(
        self, *, group: str, own: Mapping[str, tuple[str, str]] | None = None, **attributes: Any
    ) -> None:
        super().__init__(**attributes)
        self._group, self._own = group, own or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._own, *sorted(further_commands(self._group, self._own))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._own:
            module, _, attribute = self._own[cmd_name][0].partition(":")
            return getattr(importlib.import_module(module), attribute)
        return load_command(cmd_name, further_commands(self._group, self._own).get(cmd_name, []))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            fail_unknown(ctx, name, self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        further = described(further_commands(self._group, self._own))
        own = [(name, text) for name, (_, text) in self._own.items()]
        for title, commands in (("Commands", own), ("From plugins", further)):
            if commands:
                with formatter.section(title):
                    formatter.write_dl(commands)


def further_commands(group: str, own: Collection[str]) -> dict[str, list[tuple[EntryPoint, str]]]:
    """Return the commands that packages add, except those named in `own`.

    Each name maps to every entry point that claims the name, with the name and version of the distribution.
    """
    from dovetail.plugins.index import default_index

    found: dict[str, list[tuple[EntryPoint, str]]] = {}
    for entry_point, distribution in default_index().extensions(group):
        if entry_point.name not in own:
            owner = f"{distribution.name} {distribution.version}"
            found.setdefault(entry_point.name, []).append((entry_point, owner))
    return found


def load_command(name: str, claims: Sequence[tuple[EntryPoint, str]]) -> click.Command | None:
    """Import a package's command and return it; return None if `claims` is empty, as no package then has the command.

    Args:
        name: the command's name.
        claims: the entry points of this name, each with the name and version of its distribution, as in `further_commands`.

    Raises:
        PluginConflictError: several packages claim the name.
        PluginBrokenError: the command can't be imported, or is no click command.
    """
    if not claims:
        return None
    if len(claims) > 1:
        raise PluginConflictError(
            f"the command {name!r} is defined by {' and '.join(owner for _, owner in claims)}",
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
            hint=f"report it to the author of {owner.split()[0]}: the entry point must name a click command or group",
        )
    return command


def fail_unknown(ctx: click.Context, name: str, known: Collection[str]) -> NoReturn:
    """Exit with an error that says how to install an unknown command's package, or names the nearest known command."""
    from dovetail.plugins.catalogue import COMMANDS

    parent = ctx.command_path.partition(" ")[2]
    if home := COMMANDS.get(f"{parent} {name}".strip()):
        ctx.fail(f"there is no command {name!r}; install it with: pip install {home}")
    near = nearest(name, known)
    ctx.fail(
        f"there is no command {name!r}"
        + (
            f"; did you mean {near!r}?"
            if near
            else f"; `{ctx.command_path} --help` lists the commands"
        )
    )


def described(further: Mapping[str, Sequence[tuple[EntryPoint, str]]]) -> list[tuple[str, str]]:
    """Return (name, description) of each command, for `--help`. The description ends with the packages that add the command.

    `further` maps a command's name to its entry points, as `further_commands` returns them.
    """
    found = []
    for name, claims in sorted(further.items()):
        owners = f"From {' and '.join(owner for _, owner in claims)}."
        found.append((name, f"{about(claims[0][0])} {owners}".strip()))
    return found


def about(entry_point: EntryPoint) -> str:
    """Return the first sentence of a command's docstring; empty if there is no docstring or no readable source."""
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
