r"""Normal forms of answers, which are equal if only the notation differs: `\dfrac12`, `\frac{1}{2}` and `$\frac 12$`.

This module only compares decimal numbers and their fractions; `math_processes` decides mathematical equality.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal

LONGEST = 1000
"""Maximum length, in characters, of answers that are normalised; longer answers are compared unchanged."""
_DIGITS = 100
"""Maximum length of a number, in characters; longer numbers are compared as text."""

_CHARACTERS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    {
        "｛": r"\{",
        "｝": r"\}",
        "\u3000": " ",
        "。": ".",
        "、": ",",
        "\u2212": "-",
        "\u2013": "-",
        "⁄": "/",
        "·": r"\cdot ",
    }
    | {"∅": r"\emptyset ", "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac12"}
    | dict.fromkeys("€£¥￥", "")
)
"""Full-width forms (U+FF01 to U+FF5E), Chinese punctuation and Unicode signs → ASCII or LaTeX."""
_ROOT = re.compile(r"√\s?(\d+|[A-Za-z])")
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])")
_MIXED = re.compile(
    r"(?<![\w.^}\]])(?<![\d.^]\s)(?<!sqrt\s)(?<!frac\s)"  # x^2\frac12 and 1.5\frac12 are products
    r"(\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)"
    r"(?:(?:\s|~|\$|\\[,;:! ])*\\[dtc]?frac\s*(\d|\{\s*\d+\s*\})\s*(\d|\{\s*\d+\s*\})"
    r"|\s+(\d+)\s*/\s*(\d+))(?!\s*(?:\.?\d|[/!]))"
)

_DROPPED = re.compile(
    r"(?<!\\)(?:\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?|limits)(?![A-Za-z])|\\!|\\[()\[\]]|\$)"
)
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~")
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s?(\d|\{[^{}]*\})\s?(\d|\{[^{}]*\})")
_SHORT_ROOT = re.compile(r"\\sqrt\s?([0-9A-Za-z])")
_SHORT_INDEX = re.compile(r"([\^_])\{(\w)\}(?!\w)")
_PLAIN_FRACTION = re.compile(r"(?<![\w.^}\])!/])\\frac\{(-?\d+)\}\{(-?\d+)\}(?![\d.^!])")
"""A fraction that can be rewritten as `1/2` without changing its neighbours: `x\\frac{-1}{2}` is not `x-1/2`."""
_GROUPED = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_BRACKET = re.compile(r"[(\[]|\\\{")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")

_MONEY = re.compile(r"([-+]?)\\\$(.*)", re.DOTALL)
_SIGNS = (
    (re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|\\degree"), " degrees"),
    (re.compile(r"\\?%"), " percent"),
    (re.compile(r"\\\$"), " dollars"),
    (re.compile(r"\\(?:text|mathrm)\{\s*m\}"), " meters"),  # without \text, m may be a variable
)
_UNITS = (
    "degrees?", "percent", "dollars?", "cents?", "inch(?:es)?", "feet|foot|ft", "miles?", "yards?", "met(?:er|re)s?",
    "cm|centimet(?:er|re)s?", "mm", "km", "kg", "grams?", "lit(?:er|re)s?", "seconds?", "minutes?", "hours?", "days?", "weeks?",
    "months?", "years?", "units?", "square ?units?", "points?",
)  # fmt: skip
_UNIT = re.compile(rf"(?<=[\d}}])\s*({'|'.join(_UNITS)})(?:\^\{{?([23])\}}?)?$")

_EQUALS = re.compile(r":?=(?![^({\[]*[)}])")
"""`=` outside brackets, so that `P(X=3)` and `\\sum_{k=1}` don't match."""
_RELATION = re.compile(r"[<>]|\\(?:[lgn]eq?|approx)(?![A-Za-z])")
_LIST = re.compile(r"[,;&]|\\\\|\b(?:or|and)\b|\\(?:lor|vee|land|wedge|q?quad)(?![A-Za-z])")
_OPERATION = re.compile(
    r"\\?(?:sqrt|ln|log|lg|exp|abs)(?![a-z])|e\s*(?=\^)"
    r"|\\(?:[dtc]?frac|cdot|times|div|pi|binom|mid|[lr]?[vV]ert|[lr]floor|[lr]ceil)(?![A-Za-z])"
)
"""Letters that are an operation or constant, not a name, in the left side of an equation."""
_NAME = re.compile(
    r"(?P<name>(?:\s*\\?[A-Za-z]++(?:_(?:\\?[A-Za-z]++|\w|\{[^{}]*\}))?'*)++)\s*(?:(?:\^\{?-1\}?)?\((?:(?!(?P=name))[^()])*\))?"
)
"""Pattern of a name: `x`, `x_1`, `AB`, `\\angle ABC`, `f(3)`; not `x(x+1)`."""


def readable(text: str) -> str:
    r"""Return text rewritten for math-verify: full-width characters in ASCII, mixed numbers as one fraction, `\varnothing` as `\emptyset`.

    A mixed number is an integer and then a fraction, with nothing but space between: `2\frac{1}{2}`, `2\frac12` and `2 1/2` become
    `\frac{5}{2}`. math-verify reads the first two as mixed numbers only if no factor follows, and reads `2 1/2` as 3/2.
    """
    if len(text) > LONGEST:
        return text
    text = _ROOT.sub(r"\\sqrt{\1}", text.translate(_CHARACTERS))
    return _MIXED.sub(_improper, _EMPTY_SET.sub(r"\\emptyset", text))


def stated(answer: str, truth: str) -> tuple[str, str] | None:
    """Return the parts of an answer and a ground truth to compare; None if the answer states no single value (`2x = 10`, `x = 2 = 3`).

    `x = 5` means 5 if the other text is not an equation, or is an equation for the same name. The answer's left side may also combine
    names, since a question may ask for `m+n`. An equation such as `2x = 10` has yet to be solved, so its right side is not an answer.
    Two equations for different names are compared unchanged, and so are equations that state no value, such as a circle's.
    """
    ours, theirs = _sides(answer), _sides(truth)
    if len(ours) > 1 and len(theirs) > 1:
        if _kind(ours[0]) != "name" or normal_answer(ours[0]) != normal_answer(theirs[0]):
            return answer, truth
    elif len(ours) > 1:
        if _kind(ours[0]) == "unknown":
            return None
    elif len(theirs) > 1:
        if _kind(theirs[0]) != "name":
            return answer, truth
    elif len(_EQUALS.split(answer)) > 2 and as_number(normal_answer(truth)) is not None:
        return None  # an answer of several equations is not one number
    numbers = {number for side in ours if (number := as_number(side)) is not None}
    if sum(number.denominator == 1 for number in numbers) > 1:
        return None  # contradictory, such as x = 2 = 3
    return ours[-1], theirs[-1]


def normal_answer(text: str) -> str:
    r"""Return the text in a normal form, which is the same for equivalent LaTeX spellings.

    Removed: spacing commands, `\left`, `\right`, dollar signs, degrees, percent signs, a unit after a number, a final full stop,
    superfluous zeros, and commas between groups of three digits outside brackets. `\text{…}` becomes its content, `\dfrac`, `\tfrac` and
    `\frac12` become `\frac{1}{2}`. Fractions of whole numbers become `1/2` in lowest terms. Texts over LONGEST characters are only
    stripped.
    """
    return _without_unit(text)[0]


def same_text(answer: str, truth: str) -> bool | None:
    """Return whether two answers have the same normal form, ignoring the case of words; None if the normal forms do not decide.

    Answers with different whole numbers, different units or different words of at least four letters are different. (math-verify would
    read such words as products.)
    """
    (first, unit), (second, other_unit) = _without_unit(answer), _without_unit(truth)
    if unit and other_unit and unit != other_unit:
        return False
    if first == second:
        return bool(first)
    if first.isalpha() and second.isalpha() and min(len(first), len(second)) > 1:
        if first.casefold() == second.casefold():
            return True
        return False if min(len(first), len(second)) > 3 else None
    numbers = (as_number(first), as_number(second))
    whole = all(number is not None and number.denominator == 1 for number in numbers)
    return False if whole and "percent" not in unit + other_unit else None  # 100% may be meant as 1


def as_number(text: str) -> Fraction | None:
    """Return the exact value of text such as `-12`, `3.50`, `.5` or `1/2`; None for other text and for over 100 digits."""
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


def _without_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the normal form of a text without its unit, and the tuple (unit, power of the unit); the tuple is empty without a unit."""
    text = text.strip()
    if len(text) > LONGEST:
        return text, ()
    text = _SPACE.sub(" ", _DROPPED.sub("", text)).strip().rstrip(".")
    if money := _MONEY.fullmatch(text):
        text = f"{money[1]}{money[2]}\\$"
    for sign, word in _SIGNS:
        text = sign.sub(word, text)
    text = _WRAPPED.sub(r"\1", text).strip().rstrip(".").strip()
    found = _UNIT.search(text)
    unit: tuple[str, ...] = ()
    if found:
        unit = (next(one for one in _UNITS if re.fullmatch(one, found[1])), found[2] or "")
        text = text[: found.start()]
    for _, word in _SIGNS:
        text = text.replace(word, "")
    text = _FRACTION.sub(r"\\frac", text)
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{_braced(m.group(1))}{_braced(m.group(2))}", text)
    text = _SHORT_INDEX.sub(r"\1\2", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    text = text if _BRACKET.search(text) else _GROUPED.sub("", text)
    return _least(_PLAIN_FRACTION.sub(r"\1/\2", re.sub(r"\s", "", text))), unit


def _sides(text: str) -> list[str]:
    """Return the sides of an equation, or of a chain of equations; for any other text, the text alone.

    If only the last side is a name, the order is reversed, so that the name comes first.
    """
    sides = _EQUALS.split(_DROPPED.sub("", text)) if len(text) <= LONGEST else [text]
    if len(sides) == 1 or _RELATION.search(text) or any(map(_LIST.search, sides[:-1])):
        return [text]
    sides = [side.strip() for side in sides]
    return sides[::-1] if _kind(sides[-1]) == "name" != _kind(sides[0]) else sides


def _kind(side: str) -> Literal["name", "unknown", "term"]:
    """Classify the side of an equation: a name, a term with a single unknown, or another term."""
    side = _WRAPPED.sub(r"\1", side).strip()
    if _NAME.fullmatch(side) and not _OPERATION.search(side):
        return "name"
    names = set(re.findall(r"\\[A-Za-z]+|[A-Za-z]", _OPERATION.sub("", side)))
    return "unknown" if len(names) == 1 else "term"


def _improper(mixed: re.Match[str]) -> str:
    whole = int(re.sub(r"\D", "", mixed.group(1)))
    part, denominator = (int(group.strip("{ }")) for group in mixed.groups()[1:] if group)
    return (
        f"\\frac{{{whole * denominator + part}}}{{{denominator}}}" if denominator else mixed.group()
    )


def _least(text: str) -> str:
    """Return the text of a number in lowest terms, such as `3` or `1/3`; other texts are returned unchanged."""
    number = as_number(text)
    return text if number is None else str(number)


def _braced(part: str) -> str:
    return part if part.startswith("{") else f"{{{part}}}"
