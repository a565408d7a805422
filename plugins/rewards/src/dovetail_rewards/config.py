"""Config classes of the reward functions. This module imports nothing but config sections."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, VERBATIM, PluginSection


def is_pattern(_: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    """Refuse a value that is not a regular expression."""
    if value is None:
        return
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"{attribute.name}={value!r} is not a regular expression: {error}"
        ) from error


@attrs.frozen(kw_only=True)
class Gsm8kConfig(PluginSection):
    """Settings of `gsm8k`, which compares the number after the last `####` with the ground truth."""

    method: Literal["strict", "flexible"] = "strict"
    """strict: the number after the last `####`; flexible: the last number of the response."""
    score: float = 1.0
    """Score of the right number."""
    format_score: float = 0.0
    """Score of a response whose number is wrong."""


@attrs.frozen(kw_only=True)
class ExactMatchConfig(PluginSection):
    """Settings of `exact_match`, which compares the response or a part of it with the ground truth."""

    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    extract: str | None = attrs.field(default=None, validator=is_pattern, metadata={VERBATIM: True})
    """Regular expression whose last match is compared (its first group, if the pattern has one); None compares the whole response."""
    score: float = 1.0
    """Score of a response that matches."""
    miss_score: float = 0.0
    """Score of any other response."""


@attrs.frozen(kw_only=True)
class VerifiedSection(PluginSection):
    """Settings shared by reward functions that compare a mathematical answer with the accepted answers."""

    verify: Literal["symbolic", "text"] = "symbolic"
    """symbolic: mathematical equality, by math-verify in separate processes; text: equality of texts with normalised notation."""
    verify_timeout: float = attrs.field(default=5.0, validator=ABOVE_ZERO)
    """Seconds that one symbolic comparison may take. An answer that takes longer is wrong. To find out whether the ground truth is the
    cause, it is compared with the number 1; if this takes longer too, the sample fails instead.
    """
    processes: int = attrs.field(default=4, validator=AT_LEAST_ONE)
    """The number of processes for symbolic comparisons. Reward functions configured with the same number share them."""


@attrs.frozen(kw_only=True)
class MathConfig(VerifiedSection):
    """Settings of `math`, which compares a boxed or labelled answer with the ground truth."""

    extract: tuple[Literal["boxed", "answer"], ...] = attrs.field(
        default=("boxed", "answer"), validator=attrs.validators.min_len(1)
    )
    r"""Places to search for the answer, in this order. boxed: the last `\boxed{…}`; answer: the text after the last `Answer:` or
    `answer is`, up to the end of the line.
    """
    score: float = 1.0
    """Score of the right answer."""
    format_score: float = 0.0
    """Score of a boxed or labelled answer that is wrong."""
    miss_score: float = 0.0
    """Score of a response without an answer."""


@attrs.frozen(kw_only=True)
class DapoMathConfig(VerifiedSection):
    """Settings of `dapo_math`, which scores the answer after `Answer:` near the response's end with +1 or −1."""

    verify: Literal["symbolic", "text"] = "text"
    """text: equality of texts with normalised notation; symbolic: mathematical equality, by math-verify in separate processes."""
    extract: Literal["answer", "boxed"] = "answer"
    r"""answer: the text after the last `Answer:`, up to the end of the line; boxed: the last `\boxed{…}`."""
    window: int = attrs.field(default=300, validator=AT_LEAST_ONE)
    """The number of characters at the end of the response that are searched for the answer."""
    score: float = 1.0
    """Score of the right answer."""
    miss_score: float = -1.0
    """Score of a wrong answer, and of a response without an answer."""
