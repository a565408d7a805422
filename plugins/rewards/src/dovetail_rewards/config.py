"""Config classes of the reward functions. Nothing here imports more than the config sections."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from dovetail.sections import VERBATIM, PluginSection


def _is_pattern(_: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    """Refuse what is not a regular expression."""
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
    """The number after the last `####`, compared with the ground truth."""

    method: Literal["strict", "flexible"] = "strict"
    """strict: the number after the last `####`; flexible: the last number of the response."""
    score: float = 1.0
    """For the right number."""
    format_score: float = 0.0
    """For a wrong number in the right place."""


@attrs.frozen(kw_only=True)
class ExactMatchConfig(PluginSection):
    """The response, or a part of it, equals the ground truth."""

    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore the difference of upper and lower case."""
    extract: str | None = attrs.field(
        default=None, validator=_is_pattern, metadata={VERBATIM: True}
    )
    """Regular expression whose last match is compared (its first group where it has one); None compares the whole response."""
    score: float = 1.0
    """For a response that matches."""
    miss_score: float = 0.0
    """For any other."""


@attrs.frozen(kw_only=True)
class RegexFormatConfig(PluginSection):
    """The response has the form of a regular expression."""

    pattern: str = attrs.field(validator=_is_pattern, metadata={VERBATIM: True})
    """Regular expression of the form; `.` matches line breaks. A group `(?P<answer>…)` marks the answer."""
    match: Literal["full", "search"] = "full"
    """full: the whole response has the form (white space at its ends aside); search: a part of it has."""
    format_score: float = 1.0
    """For the right form."""
    answer_score: float = attrs.field(default=0.0)
    """Added where the group `answer` equals the ground truth, white space at its ends aside."""
    miss_score: float = 0.0
    """For another form."""

    @answer_score.validator
    def _has_answer_group(self, _: attrs.Attribute[float], value: float) -> None:
        if value and "answer" not in re.compile(self.pattern).groupindex:
            raise ValueError(
                f"answer_score={value} needs a group (?P<answer>…) in pattern={self.pattern!r}"
            )
