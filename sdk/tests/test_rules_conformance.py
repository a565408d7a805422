"""RulesConformance fails if a rule is silent, says too little, or is not tested."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.interfaces import Finding
from dovetail.plugins.rules import InstalledRule
from dovetail_sdk.testing.conformance import RulesConformance


def many_samples(config: Any, plan: Any) -> Iterator[Finding]:
    """More than eight samples a prompt, which this test takes for too many."""
    if config.rollout.n > 8:
        yield Finding.warning(f"rollout.n = {config.rollout.n}", hint="set rollout.n=8")


def without_a_fix(config: Any, plan: Any) -> Iterator[Finding]:
    """Terse."""
    yield Finding.warning("rollout.n is what it is")


FOUND = {"many_samples": [(["rollout.n=9"], "warning", "rollout.n = 9")]}
SILENT = {"many_samples": [[], ["rollout.n=8"]]}


class Suite(RulesConformance):
    distribution = "acme"
    found = FOUND
    silent = SILENT


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that installs rules of `acme`, and one of another package."""

    def install(*functions: Any) -> None:
        installed = [InstalledRule(f.__name__, "acme", f.__doc__, f) for f in functions]
        other = InstalledRule("other", "another", "", without_a_fix)
        monkeypatch.setattr(
            "dovetail_sdk.testing.conformance.rules.installed_rules", lambda: [*installed, other]
        )

    return install


def test_a_sound_rule_passes(rules: Any) -> None:
    rules(many_samples)
    suite = Suite()
    suite.test_every_rule_is_tried_and_says_what_it_catches()
    suite.test_a_finding_says_what_is_wrong_and_which_key_fixes_it(
        "many_samples", ["rollout.n=9"], "warning", "rollout.n = 9"
    )
    suite.test_a_rule_leaves_alone_what_is_right("many_samples", ["rollout.n=8"])


@pytest.mark.parametrize(
    ("overrides", "severity", "words"),
    [
        (["rollout.n=8"], "warning", "rollout.n"),
        (["rollout.n=9"], "error", "rollout.n"),
        (["rollout.n=9"], "warning", "rollout.k"),
    ],
)
def test_what_a_rule_does_not_say_fails(
    rules: Any, overrides: list[str], severity: str, words: str
) -> None:
    rules(many_samples)
    with pytest.raises((AssertionError, ValueError)):
        Suite().test_a_finding_says_what_is_wrong_and_which_key_fixes_it(
            "many_samples", overrides, severity, words
        )


def test_a_finding_without_a_fix_and_a_rule_that_is_not_quiet_fail(rules: Any) -> None:
    rules(without_a_fix)
    with pytest.raises(AssertionError):
        Suite().test_a_finding_says_what_is_wrong_and_which_key_fixes_it(
            "without_a_fix", [], "warning", "rollout.n"
        )
    with pytest.raises(AssertionError):
        Suite().test_a_rule_leaves_alone_what_is_right("without_a_fix", [])


def test_a_rule_that_is_not_tried_or_hardly_described_fails(rules: Any) -> None:
    rules(many_samples, without_a_fix)
    with pytest.raises(AssertionError):
        Suite().test_every_rule_is_tried_and_says_what_it_catches()
    suite = type("Wide", (Suite,), {"elsewhere": frozenset({"without_a_fix"})})()
    with pytest.raises(AssertionError, match="without_a_fix"):
        suite.test_every_rule_is_tried_and_says_what_it_catches()


def test_each_config_is_a_test_of_its_own() -> None:
    made: list[Any] = []

    def parametrize(names: Any, cases: Any, ids: Any) -> None:
        made.append((list(names), list(cases), list(ids)))

    for fixtures in (
        ["rule", "overrides", "severity", "words"],
        ["rule", "overrides"],
        ["tmp_path"],
    ):
        metafunc = SimpleNamespace(fixturenames=fixtures, parametrize=parametrize)
        Suite().pytest_generate_tests(metafunc)
    (found, silent) = made
    assert found[1:] == (
        [("many_samples", ["rollout.n=9"], "warning", "rollout.n = 9")],
        ["many_samples: rollout.n=9"],
    )
    assert silent[2] == ["many_samples: defaults", "many_samples: rollout.n=8"]
