"""Comparison of a program's output or return value with the expected value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from dovetail_rewards.functions.code_compare import same_output, same_value


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2 \n\n", "1 2", True),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("yes", "YES", False),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1e-9", "0.0", True),
        ("1000000.0", "1000000.5", True),
        ("3", "3.0", True),
        ("12", "13", False),
        ("100000000", "100000001", False),
        ("nan", "nan", True),
        ("inf", "-inf", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_output_is_compared_by_words_and_lines(printed, expected, same) -> None:
    assert same_output(printed, expected, 1e-6) is same


def test_without_a_tolerance_numbers_are_texts() -> None:
    assert not same_output("0.50", "0.5", 0.0)


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        (1, 1, True),
        (True, 1, False),
        (0, False, False),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        ([1, [2]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ({"a": [1.0]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, None, True),
        ("1", 1, False),
        (10**400, 1.0, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_values_are_compared_as_json_has_them(returned, expected, same) -> None:
    assert same_value(returned, expected, 1e-6) is same


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(value=json_values)
def test_every_value_equals_itself(value) -> None:
    assert same_value(value, json.loads(json.dumps(value)), 0.0)
