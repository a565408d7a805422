"""Preflight rules of installed packages: what an entry point may name, and one that can't be imported."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.plugins.rules import GROUP, installed_rules

RULES = '''
from pathlib import PurePath
from textwrap import dedent


def too_many(config, plan):
    """Too many samples."""
    yield from ()


def even(config, plan):
    """An odd number."""
    yield from ()


def _helper():
    pass
'''


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is installed where one package declares these targets."""
    (tmp_path / "acme_rules.py").write_text(RULES)
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('no such engine')")
    monkeypatch.syspath_prepend(tmp_path)

    def rules(**targets: str):
        declared = [EntryPoint(name, target, GROUP) for name, target in targets.items()]
        found = [(each, SimpleNamespace(name="acme")) for each in declared]
        index = SimpleNamespace(extensions=lambda group: found if group == GROUP else [])
        monkeypatch.setattr("dovetail.plugins.rules.default_index", lambda: index)
        return installed_rules()

    return rules


def test_all_public_functions_of_a_module_are_rules_and_nothing_that_it_imports(rules) -> None:
    found = rules(acme="acme_rules")
    assert [(r.name, r.distribution, r.doc) for r in found] == [
        ("even", "acme", "An odd number."),
        ("too_many", "acme", "Too many samples."),
    ]


def test_an_entry_point_may_name_one_function(rules) -> None:
    assert [rule.name for rule in rules(acme="acme_rules:even")] == ["even"]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("acme_broken", "no such engine"),
        ("acme_nowhere", "ModuleNotFoundError"),
        ("acme_rules:odd", "AttributeError"),
        ("acme_rules:__name__", "AttributeError"),
    ],
)
def test_what_can_not_be_imported_is_a_rule_that_fails_with_the_reason(rules, target, why) -> None:
    broken, good = rules(acme=target, even="acme_rules:even")
    assert (broken.name, good.name) == ("acme", "even")
    assert why in broken.doc
    with pytest.raises((RuntimeError, ImportError, AttributeError)):
        broken.check(None, None)
