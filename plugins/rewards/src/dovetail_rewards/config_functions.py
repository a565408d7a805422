"""Config classes of the functions that compare mathematical answers. Nothing here imports more than the config sections."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import PluginSection, Validator

_COUNT: Validator = attrs.validators.ge(1)
_POSITIVE: Validator = attrs.validators.gt(0)


def not_empty(_: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    """Refuse no place at all."""
    if not value:
        raise ValueError(f"{attribute.name} must name at least one place")


@attrs.frozen(kw_only=True)
class VerifiedSection(PluginSection):
    """How an answer is compared with the accepted ones."""

    verify: Literal["symbolic", "text"] = "symbolic"
    """symbolic: mathematical equality, by math-verify in processes of its own; text: equality after notation is made uniform."""
    verify_timeout: float = attrs.field(default=5.0, validator=_POSITIVE)
    """Seconds that one symbolic comparison may take. An answer that needs more is wrong; where the ground truth alone does, the sample fails."""
    processes: int = attrs.field(default=4, validator=_COUNT)
    """Processes for symbolic comparisons, begun when needed; functions with the same number share them."""


@attrs.frozen(kw_only=True)
class MathConfig(VerifiedSection):
    """A mathematical answer, boxed or after a label."""

    extract: tuple[Literal["boxed", "answer"], ...] = attrs.field(
        default=("boxed", "answer"), validator=not_empty
    )
    r"""Where the answer is looked for, in this order: the last `\boxed{…}`; the line after the last `Answer:` or `answer is`."""
    score: float = 1.0
    """For the right answer."""
    format_score: float = 0.0
    """For a wrong answer in the right place."""
    miss_score: float = 0.0
    """For a response without an answer."""


@attrs.frozen(kw_only=True)
class DapoMathConfig(VerifiedSection):
    """The answer after `Answer:` near the end, +1 or −1."""

    verify: Literal["symbolic", "text"] = "text"
    """text: equality after notation is made uniform; symbolic: mathematical equality, by math-verify in processes of its own."""
    extract: Literal["answer", "boxed"] = "answer"
    r"""answer: the line after the last `Answer:`; boxed: the last `\boxed{…}`."""
    window: int = attrs.field(default=300, validator=_COUNT)
    """Characters at the end of the response in which the answer must stand."""
    score: float = 1.0
    """For the right answer."""
    miss_score: float = -1.0
    """For a wrong answer, and for none."""
