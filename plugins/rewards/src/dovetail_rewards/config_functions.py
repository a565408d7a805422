"""Config classes of the reward functions by data source and of the shaping terms. Nothing here imports more than the config sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import NOT_NEGATIVE, VERBATIM, PluginSection, Validator

_COUNT: Validator = attrs.validators.ge(1)
_SHARE: Validator = [attrs.validators.ge(0), attrs.validators.le(1)]
_POSITIVE: Validator = attrs.validators.gt(0)


def _is_pattern(_: object, attribute: attrs.Attribute[Any], value: str | None) -> None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(
            f"{attribute.name}={value!r} is not a regular expression: {error}"
        ) from error


def _not_empty(_: object, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
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
        default=("boxed", "answer"), validator=_not_empty
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


@attrs.frozen(kw_only=True)
class Geometry3kConfig(VerifiedSection):
    """A reasoned, boxed answer: a weight for the form, the rest for the answer."""

    format_weight: float = attrs.field(default=0.1, validator=_SHARE)
    """Share of the score that the form earns."""
    require_think: bool = True
    r"""The form is `<think>…</think>` followed by a box; otherwise a box is enough."""


@attrs.frozen(kw_only=True)
class MultipleChoiceConfig(PluginSection):
    """The letter that a response chooses."""

    choices: str = attrs.field(
        default="ABCDEFGHIJ", validator=attrs.validators.matches_re(r"[A-Z]{2,26}")
    )
    """The letters that may be chosen."""
    extract: tuple[Literal["boxed", "tag", "statement", "line", "last"], ...] = attrs.field(
        default=("boxed", "tag", "statement", "line"), validator=_not_empty
    )
    r"""Where the letter is looked for, in this order: the last `\boxed{…}`; the last `<answer>…</answer>`; after the last
    `answer is` or `Answer:`; a last line that holds the letter alone; the last letter that stands alone anywhere."""
    score: float = 1.0
    """For the right letter."""
    format_score: float = 0.0
    """For another letter."""
    miss_score: float = 0.0
    """For a response that chooses none."""


@attrs.frozen(kw_only=True)
class FuzzyMatchConfig(PluginSection):
    """How near the response comes to the ground truth."""

    metric: Literal["token_f1", "edit"] = "token_f1"
    """token_f1: harmonic mean of precision and recall of words; edit: 1 less the edit distance over the longer length."""
    normalise: bool = True
    """Ignore case, punctuation, the articles a, an and the, and runs of white space."""
    extract: str | None = attrs.field(
        default=None, validator=_is_pattern, metadata={VERBATIM: True}
    )
    """Regular expression whose last match is compared (its first group where it has one); None compares the whole response."""
    threshold: float | None = attrs.field(default=None, validator=attrs.validators.optional(_SHARE))
    """From this similarity on the score is 1, and 0 below; None gives the similarity itself."""
    score: float = 1.0
    """What a similarity of 1 is worth."""


@attrs.frozen(kw_only=True)
class JsonSchemaConfig(PluginSection):
    """The answer is JSON of a given form."""

    schema: Mapping[str, Any] | None = attrs.field(default=None, metadata={VERBATIM: True})
    """JSON Schema of every answer; None where each row's ground truth is its schema, or where values alone are compared."""
    compare: bool = False
    """The ground truth is the value that the answer should have, as JSON text or as it is."""
    extract: Literal["auto", "whole", "fenced"] = "auto"
    """Where the JSON is: the whole response; the last fenced block; auto: the last fenced block, else the whole response."""
    parse_score: float = 0.0
    """For an answer that is JSON."""
    valid_score: float = 1.0
    """For one that is valid."""
    fields_score: float = 0.0
    """Times the share of fields that are right: valid by the schema, or, with `compare`, equal to the ground truth's."""


@attrs.frozen(kw_only=True)
class LengthPenaltyConfig(PluginSection):
    """0 for a response of a fitting length, down to −penalty for one that is too long or too short."""

    unit: Literal["words", "characters", "tokens"] = "words"
    """What is counted; of an episode, `tokens` counts those of tools too. `algorithm.overlong_penalty` punishes by tokens outside the reward."""
    limit: int = attrs.field(validator=_COUNT)
    """Length from which the whole penalty is due."""
    buffer: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Lengths before `limit` over which the penalty grows evenly."""
    minimum: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Length below which a penalty grows evenly, to the whole of it for an empty response."""
    penalty: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """The largest penalty."""

    @buffer.validator
    def _within_limit(self, _: attrs.Attribute[int], value: int) -> None:
        if value > self.limit:
            raise ValueError(f"buffer={value} must be at most limit={self.limit}")

    @minimum.validator
    def _below_buffer(self, _: attrs.Attribute[int], value: int) -> None:
        if value > self.limit - self.buffer:
            raise ValueError(
                f"minimum={value} must be at most limit - buffer = {self.limit - self.buffer}"
            )


@attrs.frozen(kw_only=True)
class RepetitionPenaltyConfig(PluginSection):
    """0 for a response that repeats no run of words, down to −penalty for one that is all repetition."""

    n: int = attrs.field(default=3, validator=_COUNT)
    """Length of the runs."""
    unit: Literal["words", "characters"] = "words"
    """What runs are made of; characters suit languages without spaces."""
    free: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Share of repeated runs that costs nothing."""
    penalty: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """The largest penalty."""


@attrs.frozen(kw_only=True)
class InstructionFollowingConfig(PluginSection):
    """The response keeps to instructions that can be checked."""

    scoring: Literal["all", "share"] = "all"
    """all: 1 where every instruction is kept, else 0; share: the share of instructions kept."""
    loose: bool = False
    """Also accept what is right without its first or last line, or without asterisks: an introduction or emphasis is no fault."""
    score: float = 1.0
    """What a full result is worth."""
