"""Loads exactly the entry point that the plugin index chose, with stevedore."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from stevedore.driver import DriverManager


class ChosenDriver(DriverManager):  # type: ignore[misc]
    """A stevedore driver manager that sees only the entry point that the plugin index chose.

    By default, stevedore reads a disk cache that can be stale, forgets an entry point's distribution, and fails if
    two distributions use the same name.
    """

    def __init__(self, chosen: EntryPoint) -> None:
        self._chosen = chosen
        super().__init__(namespace=chosen.group, name=chosen.name)

    def list_entry_points(self) -> list[EntryPoint]:
        """Return only the chosen entry point."""
        return [self._chosen]


def load_entry_point(chosen: EntryPoint) -> object:
    """Import and return the target of an entry point; exceptions of the import are raised unchanged."""
    return ChosenDriver(chosen).extensions[0].plugin
