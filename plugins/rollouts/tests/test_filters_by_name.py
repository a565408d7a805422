"""Sample filters of a list are kept by name."""

from __future__ import annotations

from types import SimpleNamespace

from dovetail_rollouts.source import _by_name


def test_plugins_of_one_name_are_all_kept() -> None:
    class Keep(SimpleNamespace):
        pass

    class Sieve(SimpleNamespace):
        pass

    plugins = [Keep(name="keep"), Sieve(name="keep"), Keep(name="keep"), Sieve(name="keep_2")]
    named = _by_name(plugins)
    assert list(named) == ["keep", "keep_2", "keep_3", "keep_2_2"]
    assert list(named.values()) == plugins
