"""`dovetail plugins`: the group whose commands come from installed packages."""

from __future__ import annotations

import click

from dovetail.cli.further import ExtensibleGroup


@click.group(cls=ExtensibleGroup, group="dovetail.cli.plugins")
def plugins() -> None:
    """List, show, lock, verify and write plugins. Packages add the commands."""
