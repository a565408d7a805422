"""RulesConformance: the suite of a package's preflight rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.plugins.rules import InstalledRule, installed_rules
from dovetail_sdk.testing.findings import findings_of


class RulesConformance:
    """Conformance suite for preflight rules, which find problems of a config before a run: subclass it and set the attributes.

    Attributes:
        distribution: the installed package whose rules are tested.
        found: cases with a finding, by rule: `key=value` overrides of the config, the finding's severity, and words of its message.
        silent: cases without a finding, by rule: `key=value` overrides of the config.
        elsewhere: rules of the package that other tests cover.
    """

    distribution: ClassVar[str]
    found: ClassVar[Mapping[str, Sequence[tuple[Sequence[str], str, str]]]]
    silent: ClassVar[Mapping[str, Sequence[Sequence[str]]]]
    elsewhere: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def rules(cls) -> dict[str, InstalledRule]:
        """Return the package's rules by name."""
        installed = (rule for rule in installed_rules() if rule.distribution == cls.distribution)
        return {rule.name: rule for rule in installed}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test for each config of `found` and `silent`."""
        if "overrides" not in metafunc.fixturenames:
            return
        names = ["rule", "overrides"]
        cases: list[Any] = [(rule, each) for rule, all_ in self.silent.items() for each in all_]
        if "words" in metafunc.fixturenames:
            names += ["severity", "words"]
            cases = [(rule, *each) for rule, all_ in self.found.items() for each in all_]
        titles = [f"{case[0]}: {' '.join(case[1]) or 'defaults'}" for case in cases]
        metafunc.parametrize(names, cases, ids=titles)

    def test_a_finding_says_what_is_wrong_and_which_key_fixes_it(
        self, rule: str, overrides: Sequence[str], severity: str, words: str
    ) -> None:
        (finding,) = findings_of(self.rules()[rule].check, *overrides)
        assert (finding.rule, finding.severity) == (rule, severity)
        assert words in finding.message
        assert finding.hint is not None
        assert "=" in finding.hint

    def test_a_rule_leaves_alone_what_is_right(self, rule: str, overrides: Sequence[str]) -> None:
        assert findings_of(self.rules()[rule].check, *overrides) == []

    def test_every_rule_is_tried_and_says_what_it_catches(self) -> None:
        rules = self.rules()
        assert rules.keys() == self.found.keys() | self.elsewhere
        assert self.found.keys() == self.silent.keys()
        assert [name for name, rule in rules.items() if len(rule.doc.split()) <= 10] == []
