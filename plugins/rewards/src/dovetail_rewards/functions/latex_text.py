r"""Answers as plain texts that are equal where their notation alone differs: `\dfrac12`, `\frac{1}{2}` and `$\frac 12$`.

No mathematics is done beyond decimal numbers and fractions of them; `math_processes` decides mathematical equality.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction

LONGEST = 1000
"""Characters beyond which an answer is compared as it stands."""
_DIGITS = 100
"""Digits beyond which a number is compared as text."""

_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?|limits)(?![A-Za-z])"
    r"|\\[,;:! ]|~|\\(?:quad|qquad)(?![A-Za-z])|\$|\\[()\[\]]"
)
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s?(\d|\{[^{}]*\})\s?(\d|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s?([0-9A-Za-z])")
_PLAIN_FRACTION = re.compile(r"(?<![\w.^}\])!/])\\frac\{(-?\d+)\}\{(-?\d+)\}(?![\d.^!])")
"""A fraction that can be written `1/2` without running into its neighbours: `x\\frac{-1}{2}` is not `x-1/2`."""
_GROUPED = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_MIXED = re.compile(
    r"(?<![\w.^}\]])(?<![\d.^]\s)(?<!sqrt\s)(?<!frac\s)"  # x^2\frac12 and 1.5\frac12 are products
    r"(\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)"
    r"(?:(?:\s|~|\$|\\[,;:! ])*\\[dtc]?frac\s*(\d|\{\s*\d+\s*\})\s*(\d|\{\s*\d+\s*\})"
    r"|\s+(\d+)\s*/\s*(\d+))(?!\s*(?:\.?\d|[/!]))"
)
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])|∅")
_DEGREES = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|°|\\degree")
_LETTER_IS = re.compile(r"[A-Za-z]\s?=\s?(?=[^=]*$)")
_NAME_IS = re.compile(r"^[^=<>!:,;]*[A-Za-z][^=<>!:,;]*=(?:[^=<>!:,;A-Za-z]*=)*(?=[^=]+$)")
"""`m+n=` and `m+n=21+13=`; no second equation, list or inequality."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_UNITS = re.compile(
    r"(?<=[\d}])\s*(?:degrees?|dollars?|cents?|percent|inches|inch|feet|foot|ft|miles?|yards?|meters?|metres?"
    r"|centimeters?|cm|mm|km|kg|grams?|liters?|litres?|seconds?|minutes?|hours?|days?|weeks?|months?|years?"
    r"|units?|points?|squareunits?|square units?)(?:\^\{?[23]\}?)?$"
)


def unambiguous(text: str) -> str:
    r"""Return the text with each mixed number as one fraction, and `\varnothing` as `\emptyset`.

    A mixed number is digits and then a fraction of digits, with nothing but space between: `2\frac{1}{2}`, `2\frac12` and `2 1/2`
    become `\frac{5}{2}`. math-verify reads the first two so only where no factor follows, and `2 1/2` as 3/2.
    """
    if len(text) > LONGEST:
        return text
    return _MIXED.sub(_improper, _EMPTY_SET.sub(r"\\emptyset", text))


def normal_answer(text: str) -> str:
    r"""The text with one spelling for what LaTeX writes in several ways.

    Spacing commands, `\left`, `\right` and dollar signs go; `\text{…}` leaves its content; `\dfrac`, `\tfrac` and
    `\frac12` become `\frac{1}{2}`; commas between groups of three digits, degrees, a percent sign, a unit after a
    number, one letter and the only `=` at the front, and a closing full stop go; numbers lose their idle zeros, and fractions of whole
    numbers become `1/2` in lowest terms. Texts beyond LONGEST characters stay as they are, stripped.
    """
    text = text.strip()
    if len(text) > LONGEST:
        return text
    text = _DROPPED.sub("", text.replace("−", "-").replace("\\%", "").replace("\\$", ""))
    text = _WRAPPED.sub(r"\1", _DEGREES.sub("", text)).strip().rstrip("%").rstrip(".").strip()
    text = _UNITS.sub("", text)
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{_braced(m.group(1))}{_braced(m.group(2))}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _GROUPED.sub("", text)
    text = re.sub(r"\s", "", _LETTER_IS.sub("", text, count=1) if _LETTER_IS.match(text) else text)
    text = _PLAIN_FRACTION.sub(r"\1/\2", text)
    return _least(text)


def same_text(answer: str, truth: str) -> bool:
    """Whether two answers have the same normal form, the case of letters aside where both are words.

    Where the truth is no equation, `m+n = 34` is 34.
    """
    first, second = normal_answer(answer), normal_answer(truth)
    if "=" not in second:
        first = _least(_NAME_IS.sub("", first))
    if first == second:
        return bool(first)
    return first.isalpha() and second.isalpha() and first.casefold() == second.casefold()


def as_number(text: str) -> Fraction | None:
    """The exact value of `-12`, `3.50`, `.5` or `1/2`; None for all else and for numbers of over 100 digits."""
    parts = text.split("/")
    if len(parts) > 2 or len(text) > _DIGITS or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    try:
        values = [Fraction(Decimal(part)) for part in parts]
    except (InvalidOperation, ValueError):
        return None
    if len(values) == 1:
        return values[0]
    return values[0] / values[1] if values[1] else None


def _improper(mixed: re.Match[str]) -> str:
    whole = int(re.sub(r"\D", "", mixed.group(1)))
    part, denominator = (int(group.strip("{ }")) for group in mixed.groups()[1:] if group)
    return (
        f"\\frac{{{whole * denominator + part}}}{{{denominator}}}" if denominator else mixed.group()
    )


def _least(text: str) -> str:
    """A number as `3`, or as `1/3` in lowest terms; all else as it is."""
    number = as_number(text)
    return text if number is None else str(number)


def _braced(part: str) -> str:
    return part if part.startswith("{") else f"{{{part}}}"
