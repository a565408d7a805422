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
_PLAIN_FRACTION = re.compile(r"\\frac\{(-?\d+)\}\{(-?\d+)\}")
_GROUPED = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_DEGREES = re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|°|\\degree")
_LETTER_IS = re.compile(r"[A-Za-z]\s?=\s?")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_UNITS = re.compile(
    r"(?<=[\d}])\s*(?:degrees?|dollars?|cents?|percent|inches|inch|feet|foot|ft|miles?|yards?|meters?|metres?"
    r"|centimeters?|cm|mm|km|kg|grams?|liters?|litres?|seconds?|minutes?|hours?|days?|weeks?|months?|years?"
    r"|units?|points?|squareunits?|square units?)(?:\^\{?[23]\}?)?$"
)


def normal_answer(text: str) -> str:
    r"""The text with one spelling for what LaTeX writes in several ways.

    Spacing commands, `\left`, `\right` and dollar signs go; `\text{…}` leaves its content; `\dfrac`, `\tfrac` and
    `\frac12` become `\frac{1}{2}`; commas between groups of three digits, degrees, a percent sign, a unit after a
    number, one letter and `=` at the front, and a closing full stop go; numbers lose their idle zeros, and fractions of whole
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
    text = _PLAIN_FRACTION.sub(lambda m: f"{m.group(1)}/{m.group(2)}", text)
    text = _GROUPED.sub("", text)
    text = re.sub(r"\s", "", _LETTER_IS.sub("", text, count=1) if _LETTER_IS.match(text) else text)
    number = as_number(text)
    return text if number is None else _plain(number)


def same_text(answer: str, truth: str) -> bool:
    """Whether two answers have the same normal form, the case of letters aside where both are words."""
    first, second = normal_answer(answer), normal_answer(truth)
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


def _plain(number: Fraction) -> str:
    """`3`, or `1/3` in lowest terms."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{number.numerator}/{number.denominator}"


def _braced(part: str) -> str:
    return part if part.startswith("{") else f"{{{part}}}"
