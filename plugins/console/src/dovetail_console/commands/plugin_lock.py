"""`dovetail plugins lock|verify`: writes the lock of the plugins that a run would use, and shows changes since then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dovetail.cli import render
from dovetail.errors import DovetailError, PluginError

SCHEMA = 1
_CONFIGS = (".yaml", ".yml")


@click.command("lock")
@click.argument("what", metavar="[CONFIG [KEY=VALUE]... | KIND/NAME...]", nargs=-1)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default="plugins.lock.json",
    show_default=True,
    help="Where to write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the lock, and write no file.")
def lock(what: tuple[str, ...], output: Path, as_json: bool) -> None:
    """Write a lock file of the plugins that a run of CONFIG would use, of the named plugins, or of every compatible plugin.

    The lock holds versions, interfaces, hashes of code that no version pins, and the packages that the plugins depend on, in this
    environment and in the environments of `runtime.environments`.
    """
    from dovetail.plugins import write_lock

    of_config = bool(what) and what[0].endswith(_CONFIGS)
    made = _of_config(what[0], what[1:]) if of_config else _of_names(what)
    if as_json:
        render.dump_json(made)
        return
    write_lock(output, made)
    count = len(made["plugins"])
    places = made.get("environments", {})
    besides = f", environments of {', '.join(places)}" if places else ""
    render.line(
        f"{output}: {count} plugin{'s' if count != 1 else ''}, {len(made['packages'])} packages{besides}"
    )


@click.command("verify")
@click.argument("lock_file", metavar="LOCK", type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Exit with 1 where anything differs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(ctx: click.Context, lock_file: Path, strict: bool, as_json: bool) -> None:
    """Compare a lock file, or the lock in a run directory, with what is installed, and print each difference.

    Exits with 1 if a run with this lock would be refused: a plugin is missing, comes from another distribution, or is made
    for other versions of its interface. Differences in versions, contents and packages are only reported.
    """
    from dovetail.plugins import differences, now_for, read_lock

    old = read_lock(lock_file)
    new, gone = now_for(old)
    found = differences(old, new, gone)
    refused = [difference for difference in found if difference.refused]
    if as_json:
        render.dump_json(
            {
                "schema": SCHEMA,
                "lock": str(lock_file),
                "plugins": len(old["plugins"]),
                "refused": bool(refused),
                "differences": [difference.to_dict() for difference in found],
            }
        )
    else:
        for difference in found:
            if difference.refused:
                word = click.style("refused: ", fg="red", bold=True)
                render.line(difference.text, label=word, err=True)
            else:
                render.warning(difference.text)
        told = f"{len(found)} difference{'s' if len(found) != 1 else ''}" if found else "unchanged"
        render.line(f"{len(old['plugins'])} plugins: {told}" if found else told)
    if refused or (strict and found):
        ctx.exit(1)


def _of_config(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the lock that `dovetail train` would write for a config.

    If the data can't be loaded, a warning is printed, and the lock lacks the reward functions that rows select.
    """
    from dovetail.config import load_config
    from dovetail.planning import make_plan
    from dovetail.run import load_data, lock_of

    loaded = load_config(path, overrides)
    data = None
    try:
        data = load_data(loaded.config)
    except DovetailError as error:
        render.warning(
            f"the lock lacks the reward functions that rows select by data_source: {error.message}"
        )
    return lock_of(loaded.config, make_plan(loaded.config), data)


def _of_names(names: Sequence[str]) -> dict[str, Any]:
    from dovetail.interfaces import PluginRef
    from dovetail.plugins import default_index, lock_for

    index = default_index()
    entries = [entry for entry in index.entries() if entry.usable]
    if names:
        entries = [index.find(*_kind_and_name(name)) for name in names]
    return lock_for(
        PluginRef(kind=e.kind, name=e.name, distribution=e.distribution) for e in entries
    )


def _kind_and_name(text: str) -> tuple[str, str]:
    kind, _, name = text.partition("/")
    if not name:
        raise PluginError(
            f"{text!r} is neither KIND/NAME, such as rollout/hf, nor a config's file",
            hint=f"a config's name ends in {' or '.join(_CONFIGS)}",
        )
    return kind, name
