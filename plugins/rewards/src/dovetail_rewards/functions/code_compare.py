"""Compares a program's results with the expected results of a test."""

from __future__ import annotations

import math


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Return whether a program's output equals the expected output, compared line by line and word by word.

    The amount of white space between words, and white space at the ends of lines and of the output, are ignored. If both words are numbers
    and at least one has a decimal point or exponent, they may differ by `tolerance`, absolutely or relative to the expected number.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def same_value(returned: object, expected: object, tolerance: float) -> bool:
    """Return whether two JSON values are equal: lists in order, mappings by key, numbers by value; true is not equal to 1.

    A float may differ by `tolerance`, absolutely or relative to the expected number.
    """
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(returned, int) and isinstance(expected, int):
            return returned == expected
        return _close(returned, expected, tolerance)
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(returned, expected, strict=True)
        )
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            same_value(value, expected[key], tolerance) for key, value in returned.items()
        )
    return type(returned) is type(expected) and bool(returned == expected)


def _lines(text: str) -> list[list[str]]:
    """Return the words of each line, without empty lines at the beginning and end."""
    return [line.split() for line in text.strip().splitlines()]


def _same_word(ours: str, theirs: str, tolerance: float) -> bool:
    if ours == theirs:
        return True
    if not tolerance or not any(mark in ours + theirs for mark in ".eE"):
        return False
    try:
        return _close(float(ours), float(theirs), tolerance)
    except ValueError:
        return False


def _close(ours: float, theirs: float, tolerance: float) -> bool:
    try:
        return math.isclose(ours, theirs, rel_tol=0.0, abs_tol=tolerance * max(1.0, abs(theirs)))
    except OverflowError:  # an integer is too large for a float
        return False
