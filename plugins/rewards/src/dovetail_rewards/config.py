"""Config classes of the reward functions. Nothing here imports more than the config sections."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from dovetail.sections import VERBATIM, PluginSection


def is_pattern(_: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
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
    extract: str | None = attrs.field(default=None, validator=is_pattern, metadata={VERBATIM: True})
    """Regular expression whose last match is compared (its first group where it has one); None compares the whole response."""
    score: float = 1.0
    """For a response that matches."""
    miss_score: float = 0.0
    """For any other."""
