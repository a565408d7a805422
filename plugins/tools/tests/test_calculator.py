"""The calculator's values equal Python's, and no expression takes long or runs code."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from dovetail.errors import ToolError
from dovetail_tools.calculator import calculate

# Numbers are 0 or far from 0, so that no quotient overflows: the calculator refuses infinity, which Python returns.
EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str) | st.floats(1e-3, 99).map(repr),
    lambda inner: (
        st.tuples(inner, st.sampled_from(("+", "-", "*", "/", "//", "%")), inner).map(
            lambda parts: f"({' '.join(parts)})"
        )
        | inner.map(lambda one: f"-{one}")
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_values_are_those_of_python(expression):
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError):
            calculate(expression)
        return
    assert calculate(expression) == str(expected)


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "10**4000 * 10**4000", "2**-99999999999", "(2**16000)**2"),
        *("((9**999)**99)**99", "1e308 * 10", "1 / 1e-313", "10**4300", "2**16383", "-2**14284"),
        *(
            "round(5, -999999999)",
            "round(2.5, 10**4000)",
            "round(10**4000, -10**7)",
            "max()",
            "pi(1)",
        ),
    ],
)
def test_large_values_are_refused_at_once(expression):
    began = time.process_time()
    with pytest.raises(ToolError):
        calculate(expression)
    assert time.process_time() - began < 1


@given(st.text(max_size=40))
def test_any_text_has_a_value_or_an_error(text):
    try:
        value = calculate(text)
    except ToolError:
        return
    assert isinstance(value, str)


def test_whole_numbers_are_exact_up_to_the_digits_that_python_writes():
    assert calculate("10**4299 + 1") == f"1{'0' * 4298}1"
    assert calculate("round(10**4000 + 15, -1) - 10**4000") == "20"
