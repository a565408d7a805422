"""Check of a worker's process: its plugins must be those of the controller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import PluginError, PluginIncompatibleError

_HINT = (
    "start the run again if a file was edited while it started; otherwise install the same distributions in the "
    "environment of every node"
)


def plugins_here(run_directory: Path) -> dict[str, Any] | None:
    """Return a lock of the plugins in the run's `plugins.lock.json` as this process finds them; None without such a file.

    The controller sends the result to its workers. The file itself may be older: `resume` accepts changed code, with a message.
    """
    from dovetail.plugins import lock

    if not (run_directory / lock.FILE_NAME).exists():
        return None
    # Missing plugins are ignored: one that the run uses would have stopped the controller.
    found, _ = lock.now_for({**lock.read_lock(run_directory), "environments": {}})
    return found


def check_plugins(expected: Mapping[str, Any], *, where: str) -> None:
    """Check that the plugins of this process are those of the controller.

    Args:
        expected: the controller's result of `plugins_here`.
        where: the name of this process in the error.

    Raises:
        PluginIncompatibleError: a plugin is missing, or differs in distribution, version or content; the error lists every difference.
    """
    from dovetail.plugins import lock

    try:
        found = lock.lock_for(lock.refs_of(expected))
    except PluginError as error:
        raise PluginIncompatibleError(
            f"{where} lacks a plugin that the controller has: {error.message}", hint=_HINT
        ) from error
    differences = list(dict.fromkeys(_differences(expected, found)))
    if differences:
        raise PluginIncompatibleError(
            f"{where} has other plugins than the controller: {'; '.join(differences)}", hint=_HINT
        )


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each difference of a plugin. Plugins of one distribution give equal texts, which the caller merges."""
    here = {(item["kind"], item["name"], item.get("path")): item for item in found["plugins"]}
    for was in expected["plugins"]:
        now = here[was["kind"], was["name"], was.get("path")]
        for key, words in (("version", "version"), ("sha256", "content with SHA-256")):
            if was.get(key) != now.get(key):
                source = was.get("distribution") or f"the file {was.get('path')}"
                yield f"{source} has {words} {_short(now, key)}; expected {_short(was, key)}"


def _short(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    return "none" if value is None else str(value)[:12]
