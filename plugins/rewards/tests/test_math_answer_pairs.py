"""Pairs of answer and ground truth that `math` and `dapo_math` accept or refuse: mixed numbers, equations, the empty set."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import PluginContext
from dovetail_rewards.config_functions import DapoMathConfig, MathConfig
from dovetail_rewards.functions.dapo_math import DapoMath
from dovetail_rewards.functions.math_answer import MathAnswer

EQUAL = [
    (r"1\frac{2}{3}", r"\frac{5}{3}"),
    (r"137\frac{1}{2}", r"\frac{275}{2}"),
    (r"\frac{275}{2}", r"137\frac{1}{2}"),
    (r"2\frac{1}{2}", "2.5"),
    ("2.5", r"2\frac12"),
    (r"2 \dfrac{1}{2}", "2.5"),
    (r"2\,\tfrac12", "2.5"),
    (r"$2$ $\frac{1}{2}$", "2.5"),
    ("1 1/2", "1.5"),
    ("1 1/2", r"1\frac12"),
    ("1 1/2.", "1.5"),
    (r"-1\frac{1}{2}", "-1.5"),
    (r"x = 2\frac12", "2.5"),
    (r"2\frac12 \text{ cm}", "2.5"),
    (r"22\frac12^\circ", "22.5"),
    (r"12\frac12\%", r"12.5\%"),
    (r"1,000\frac12", "1000.5"),
    (r"1{,}000\frac12", "1000.5"),
    (r"\frac{1,000}{3}", "1000/3"),
    ("1 000", "1000"),
    (r"\varnothing", r"\emptyset"),
    (r"\emptyset", r"\varnothing"),
    ("∅", r"\emptyset"),
    ("m+n = 34", "34"),
    ("$m + n = 34$", "34"),
    ("m+n = 21+13 = 34", "34"),
    (r"\frac{m}{n} = \frac12", "0.5"),
]
"""Equal as texts in one notation: under `verify: text`, too."""

EQUAL_BY_VALUE = [
    (r"(1\frac12, 3)", "(1.5, 3)"),
    ("(1 1/2, 3)", r"(\frac32, 3)"),
    (r"2\frac{1}{2}\pi", r"\frac{5\pi}{2}"),
    (r"1\frac12 x", "1.5x"),
    (r"x^2\frac12", r"\frac{x^2}{2}"),
    (r"2\frac{\pi}{3}", r"\frac{2\pi}{3}"),
    (r"2\cdot\frac12", "1"),
    (r"\{\}", r"\varnothing"),
]

OTHER = [
    ("4", r"1\frac{2}{3}"),
    (r"\frac{2}{3}", r"1\frac{2}{3}"),
    (r"\frac{1371}{2}", r"137\frac{1}{2}"),
    ("1 1/2", "5.5"),
    ("1 1/2", "1"),
    ("1 1/2", "0.5"),
    ("10.5", r"2\frac12"),
    ("1", r"2\frac12"),
    (r"\frac{1}{2} 5", r"\frac{1}{25}"),
    (r"2\frac{-1}{2}", "1.5"),
    (r"x\frac{-1}{2}", r"x-\frac12"),
    (r"1\frac{2}{0}", "2"),
    (r"2^\frac{1}{2}", "1"),
    (r"\frac{3}{2}^2", "3/4"),
    (r"\frac{1}{2},345", r"\frac{1}{2345}"),
    (r"1.5\frac12", "151/200"),
    (r"\varnothing", "0"),
    ("m+n = 35", "34"),
    ("m+n <= 34", "34"),
    ("x = 12, y = 34", "34"),
    (r"x = 12 \text{ or } x = 34", "34"),
    ("a-b = 5", "x+y = 5"),
]

Verify = Literal["text", "symbolic"]


def right(answer: str, truth: str, verify: Verify) -> bool:
    """Whether both functions take the answer; they agree."""
    math = MathAnswer(MathConfig(processes=1, verify=verify), PluginContext())
    dapo = DapoMath(DapoMathConfig(processes=1, verify=verify), PluginContext())
    first = math.compute_score(None, f"\\boxed{{{answer}}}", truth)["correct"]
    second = dapo.compute_score(None, f"Answer: {answer}", truth)["correct"]
    assert first == second
    return bool(first)


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
@pytest.mark.parametrize("verify", ["text", "symbolic"])
def test_answers_equal_in_one_notation_are_right(answer, truth, verify) -> None:
    assert right(answer, truth, verify)


@pytest.mark.parametrize(("answer", "truth"), EQUAL_BY_VALUE)
def test_answers_of_equal_value_are_right(answer, truth) -> None:
    assert right(answer, truth, "symbolic")


@pytest.mark.parametrize(("answer", "truth"), OTHER)
@pytest.mark.parametrize("verify", ["text", "symbolic"])
def test_answers_of_another_value_are_wrong(answer, truth, verify) -> None:
    assert not right(answer, truth, verify)


@st.composite
def mixed_numbers(draw: st.DrawFn) -> tuple[int, int, int]:
    """Whole part a, and b < c of its fraction."""
    denominator = draw(st.integers(2, 200))
    return (
        draw(st.integers(0, 10**6)),
        draw(st.integers(1, denominator - 1)),
        denominator,
    )


@given(number=mixed_numbers(), command=st.sampled_from(["frac", "dfrac", "tfrac", "plain"]))
@pytest.mark.parametrize("verify", ["text", "symbolic"])
def test_a_mixed_number_equals_its_value_and_none_near_it(verify, number, command) -> None:
    a, b, c = number
    mixed = f"{a} {b}/{c}" if command == "plain" else f"{a}\\{command}{{{b}}}{{{c}}}"
    value = a + Fraction(b, c)
    joined = Fraction(int(f"{a}{b}"), c)
    near = {joined, a * Fraction(b, c), Fraction(a), Fraction(b, c), value + 1, a - Fraction(b, c)}
    assert right(mixed, str(value), verify)
    assert right(str(value), mixed, verify)
    for other in near - {value}:
        assert not right(mixed, str(other), verify)
        assert not right(str(other), mixed, verify)
