"""The plugins that core ships pass the suites of their kinds, as everybody's do and as `dovetail plugins check` runs them."""

from __future__ import annotations

from dovetail.plugins.index import default_index
from dovetail_sdk.check import of_core
from dovetail_sdk.check.of_core import *  # noqa: F403 - every suite


def test_every_plugin_of_core_has_a_suite() -> None:
    entries = [e for e in default_index().entries() if e.distribution == "dovetail-core"]
    tried = {found.plugin.name for name, found in vars(of_core).items() if name.startswith("Test")}
    lacking = {entry.name for entry in entries} - tried
    assert not lacking, (
        f"declare one in dovetail_sdk.check.of_core for {', '.join(sorted(lacking))}"
    )
