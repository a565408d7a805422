"""Commands that the SDK adds to `dovetail plugins`."""

from __future__ import annotations

from pathlib import Path

import click

from dovetail_sdk.scaffold import KINDS, new_plugin


@click.command()
@click.argument("kind", metavar="KIND")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    show_default=True,
    help="Where to put the package.",
)
def new(kind: str, name: str, directory: Path) -> None:
    """Write a package with a small working plugin NAME of KIND."""
    package = new_plugin(kind, name, directory)
    click.echo(f"{package}: a {kind} plugin {name!r} with its config, manifest and tests; next:")
    click.echo(f"  cd {package} && pip install -e '.[test]' && pytest")


new.epilog = f"KIND is one of {', '.join(KINDS)}."
