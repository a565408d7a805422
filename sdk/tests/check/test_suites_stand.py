"""A standard test can't be overridden silently; it may be expected to fail, with a reason, and then it must fail."""

from __future__ import annotations

import pytest

from dovetail.errors import PluginError
from dovetail_sdk.testing.conformance import RewardFunctionConformance

pytest_plugins = ["pytester"]

NAME = "test_the_same_input_gets_the_same_score"


@pytest.mark.parametrize("replacement", [lambda self: None, None, pytest.mark.skip(lambda self: 1)])
def test_overriding_a_standard_test_is_refused_when_the_class_is_made(replacement):
    with pytest.raises(PluginError, match=f"overrides the standard test {NAME}") as caught:
        type("TestMine", (RewardFunctionConformance,), {NAME: replacement})
    assert "expected_failures" in str(caught.value)


def test_nor_does_a_mixin_override_it():
    class Mixin:
        def test_the_same_input_gets_the_same_score(self):
            pass

    with pytest.raises(PluginError, match="Mixin"):
        type("TestMine", (Mixin, RewardFunctionConformance), {})


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"test_the_same_input_gets_a_score": "why"}, f"did you mean '{NAME}'"),
        ({NAME: ""}, "''"),
        ({NAME: None}, ": None;"),
    ],
)
def test_an_expectation_names_a_test_and_has_a_reason(expected, words):
    with pytest.raises(PluginError, match="expected_failures") as caught:
        type("TestMine", (RewardFunctionConformance,), {"expected_failures": expected})
    assert words in str(caught.value)


SUITE = """
import itertools
from dovetail.sections import PluginSection
from dovetail.interfaces import RewardFunction
from dovetail_sdk.testing.conformance import RewardFunctionConformance

class Counting(RewardFunction):
    name, api, count = "counting", ">=1.0,<2", itertools.count()

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth) + next(self.count) * {step}

class TestCounting(RewardFunctionConformance):
    plugin = Counting
    right, wrong = (("a", "a"),), (("b", "a"),)
    expected_failures = {{"{name}": "it counts its calls"}}
"""


@pytest.mark.parametrize(
    ("step", "outcomes"), [(1e-6, {"xfailed": 1}), (0, {"failed": 1})], ids=["it does", "it passes"]
)
def test_an_expected_failure_has_to_fail(pytester, step, outcomes):
    pytester.makepyfile(SUITE.format(step=step, name=NAME))
    result = pytester.runpytest_inprocess("-k", "same_score", "-p", "no:cacheprovider", "-rxX")
    result.assert_outcomes(**outcomes, deselected=9)
    result.stdout.fnmatch_lines(["*it counts its calls*"])
