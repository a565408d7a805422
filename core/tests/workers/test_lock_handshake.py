"""A worker's process refuses to work with other plugins than the controller has, and names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import PluginIncompatibleError
from dovetail.interfaces import PluginRef
from dovetail.plugins import lock
from dovetail.workers import check_plugins, plugins_here

REFS = [PluginRef(kind="tracker", name="jsonl"), PluginRef(kind="runtime", name="inline")]


def of_a_controller(**changes: Any) -> dict[str, Any]:
    """What a controller finds whose environment differs in this."""
    found = lock.lock_for(REFS)
    for item in found["plugins"]:
        item.update(changes)
    return found


def test_the_same_plugins_pass(tmp_path: Path) -> None:
    lock.write_lock(tmp_path / lock.FILE_NAME, lock.lock_for(REFS))
    found = plugins_here(tmp_path)
    assert found == lock.lock_for(REFS)
    check_plugins(found, where="a worker")


def test_a_run_without_a_lock_has_nothing_to_compare(tmp_path: Path) -> None:
    assert plugins_here(tmp_path) is None


def test_a_lock_of_older_code_is_no_fault(tmp_path: Path) -> None:
    old = of_a_controller(version="0.0.1", sha256="0" * 64)
    old["plugins"].append({"kind": "tracker", "name": "gone", "distribution": "gone"})
    lock.write_lock(tmp_path / lock.FILE_NAME, old)
    found = plugins_here(tmp_path)
    assert found == lock.lock_for(REFS)


def test_another_version_or_content_is_refused_once_a_distribution() -> None:
    expected = of_a_controller(version="9.9", sha256="0" * 64)
    with pytest.raises(PluginIncompatibleError) as caught:
        check_plugins(expected, where="a worker on host")
    message = caught.value.message
    assert message.startswith("a worker on host has other plugins than the controller")
    assert "; expected 9.9" in message
    assert "expected 000000000000" in message
    assert message.count("expected 9.9") == 1  # two plugins, one distribution


@pytest.mark.parametrize("change", [{"distribution": "elsewhere"}, {"name": "unheard_of"}])
def test_a_plugin_that_is_not_here_is_named(change: dict[str, str]) -> None:
    (told,) = change.values()
    with pytest.raises(PluginIncompatibleError, match=f"lacks a plugin.*{told}"):
        check_plugins(of_a_controller(**change), where="a worker")
