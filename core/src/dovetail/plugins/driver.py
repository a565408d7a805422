"""The one place that uses stevedore: it loads exactly the entry point that the index chose."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from stevedore.driver import DriverManager


class ChosenDriver(DriverManager):  # type: ignore[misc]
    """A driver manager that sees one entry point.

    Left to itself, stevedore reads a cache on disk that can be stale, forgets which distribution an entry
    point came from, and fails where two claim one name; the index has settled all that before.
    """

    def __init__(self, chosen: EntryPoint) -> None:
        self._chosen = chosen
        super().__init__(namespace=chosen.group, name=chosen.name)

    def list_entry_points(self) -> list[EntryPoint]:
        """Return only the chosen entry point."""
        return [self._chosen]


def load_entry_point(chosen: EntryPoint) -> object:
    """Import the target of an entry point; exceptions of the import are raised unchanged."""
    return ChosenDriver(chosen).extensions[0].plugin
