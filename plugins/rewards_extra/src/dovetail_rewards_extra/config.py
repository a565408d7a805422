"""Config classes of the functions. Nothing here imports more than the config sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import AT_LEAST_ONE, NOT_NEGATIVE, VERBATIM, PluginSection, Validator
from dovetail_rewards import VerifiedSection, is_pattern

_SHARE: Validator = [attrs.validators.ge(0), attrs.validators.le(1)]


@attrs.frozen(kw_only=True)
class RegexFormatConfig(PluginSection):
    """The response has the form of a regular expression."""

    pattern: str = attrs.field(validator=is_pattern, metadata={VERBATIM: True})
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
        default=("boxed", "tag", "statement", "line"), validator=attrs.validators.min_len(1)
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
    extract: str | None = attrs.field(default=None, validator=is_pattern, metadata={VERBATIM: True})
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
    limit: int = attrs.field(validator=AT_LEAST_ONE)
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

    n: int = attrs.field(default=3, validator=AT_LEAST_ONE)
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
    """Also accept what is right without its first or last line, or without asterisks: an introduction or emphasis is not a fault."""
    score: float = 1.0
    """What a full result is worth."""
