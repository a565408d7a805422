"""Processes in another Python environment than the controller's: how the two get acquainted.

Both have dovetail-core, the runtime and the role's plugins, in the same versions; whatever else lies in them may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.plugins.isolation import (
    EnvironmentInfo,
    environment_problems,
    facts_here,
    require_environment,
)


def check_environment(
    controller: Mapping[str, Any], plugins: Iterable[Mapping[str, Any]], *, where: str
) -> None:
    """Compare this process's environment with the controller's.

    Args:
        controller: its `EnvironmentInfo`, as a mapping, for the same plugins.
        plugins: entries of its lock that this process loads.
        where: names this process in the error.

    Raises:
        PluginNeedsError, PluginIncompatibleError: names every difference with both values.
    """
    here = EnvironmentInfo(**controller)
    require_environment(where, environment_problems(here, facts_here(plugins, list(here.packages))))
