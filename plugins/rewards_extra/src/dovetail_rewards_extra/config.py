"""Config classes of the reward functions. This module imports nothing but config sections."""

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
    """Settings of `regex_format`, which scores whether the response matches a regular expression."""

    pattern: str = attrs.field(validator=is_pattern, metadata={VERBATIM: True})
    """Regular expression of the expected format; `.` matches line breaks. A group `(?P<answer>…)` marks the answer."""
    match: Literal["full", "search"] = "full"
    """full: the whole response must match, ignoring white space at both ends; search: a part of the response must match."""
    format_score: float = 1.0
    """Score of a response that matches `pattern`."""
    answer_score: float = attrs.field(default=0.0)
    """Score that is added if the group `answer` equals the ground truth, ignoring white space at both ends."""
    miss_score: float = 0.0
    """Score of a response that does not match `pattern`."""

    @answer_score.validator
    def _has_answer_group(self, _: attrs.Attribute[float], value: float) -> None:
        if value and "answer" not in re.compile(self.pattern).groupindex:
            raise ValueError(
                f"pattern={self.pattern!r} has no group (?P<answer>…), which answer_score={value} needs; add it, or set answer_score=0"
            )


@attrs.frozen(kw_only=True)
class Geometry3kConfig(VerifiedSection):
    """Settings of `geometry3k`, which scores the response's format and its boxed answer."""

    format_weight: float = attrs.field(default=0.1, validator=_SHARE)
    """Share of the score for the right format; the rest is for the right answer."""
    require_think: bool = True
    r"""Require `<think>…</think>` before the box for the right format; False requires only a box."""


@attrs.frozen(kw_only=True)
class MultipleChoiceConfig(PluginSection):
    """Settings of `multiple_choice`, which compares the letter that a response chooses with the ground truth."""

    choices: str = attrs.field(
        default="ABCDEFGHIJ", validator=attrs.validators.matches_re(r"[A-Z]{2,26}")
    )
    """The letters that may be chosen."""
    extract: tuple[Literal["boxed", "tag", "statement", "line", "last"], ...] = attrs.field(
        default=("boxed", "tag", "statement", "line"), validator=attrs.validators.min_len(1)
    )
    r"""Places to search for the letter, in this order. boxed: the last `\boxed{…}`; tag: the last `<answer>…</answer>`; statement: after
    the last `answer is` or `Answer:`; line: a last line with only the letter; last: the last separate letter anywhere.
    """
    score: float = 1.0
    """Score of the right letter."""
    format_score: float = 0.0
    """Score of a wrong letter."""
    miss_score: float = 0.0
    """Score of a response that chooses no letter."""


@attrs.frozen(kw_only=True)
class FuzzyMatchConfig(PluginSection):
    """Settings of `fuzzy_match`, which scores the similarity of the response to the ground truth."""

    metric: Literal["token_f1", "edit"] = "token_f1"
    """token_f1: harmonic mean of precision and recall of words; edit: 1 minus the edit distance divided by the longer length."""
    normalise: bool = True
    """Ignore case, punctuation, the articles a, an and the, and runs of white space."""
    extract: str | None = attrs.field(default=None, validator=is_pattern, metadata={VERBATIM: True})
    """Regular expression whose last match is compared (its first group, if the pattern has one); None compares the whole response."""
    threshold: float | None = attrs.field(default=None, validator=attrs.validators.optional(_SHARE))
    """Minimum similarity for a result of 1; a lower similarity gives 0. None takes the similarity as the result."""
    score: float = 1.0
    """Factor by which the result is multiplied: the score for a similarity of 1."""


@attrs.frozen(kw_only=True)
class JsonSchemaConfig(PluginSection):
    """Settings of `json_schema`, which checks the answer against a JSON Schema or a JSON value."""

    schema: Mapping[str, Any] | None = attrs.field(default=None, metadata={VERBATIM: True})
    """JSON Schema of every answer; None if each row's ground truth is the schema, or if only values are compared."""
    compare: bool = False
    """Compare the answer with the ground truth, which is a JSON value or its text."""
    extract: Literal["auto", "whole", "fenced"] = "auto"
    """Place of the JSON. whole: the whole response; fenced: the last fenced block; auto: the last fenced block, else the whole
    response.
    """
    parse_score: float = 0.0
    """Score that is added if the answer is JSON."""
    valid_score: float = 1.0
    """Score that is added if the schema accepts the answer."""
    fields_score: float = 0.0
    """Score that is added in proportion to the share of right fields: valid by the schema or, with `compare`, equal to the ground truth.
    """


@attrs.frozen(kw_only=True)
class LengthPenaltyConfig(PluginSection):
    """Settings of `length_penalty`: 0 for a response of suitable length, down to −penalty if the response is too long or too short."""

    unit: Literal["words", "characters", "tokens"] = "words"
    """Unit of length; in an episode, `tokens` includes tool tokens. For a length penalty outside the reward, set
    `algorithm.overlong_penalty`, which counts tokens.
    """
    limit: int = attrs.field(validator=AT_LEAST_ONE)
    """Length at which the penalty reaches its maximum."""
    buffer: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Length of the interval before `limit` over which the penalty grows linearly."""
    minimum: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Length below which the penalty grows linearly, up to its maximum for an empty response."""
    penalty: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """The largest penalty."""

    @buffer.validator
    def _within_limit(self, _: attrs.Attribute[int], value: int) -> None:
        if value > self.limit:
            raise ValueError(
                f"buffer={value} is above limit={self.limit}; expected at most {self.limit}"
            )

    @minimum.validator
    def _below_buffer(self, _: attrs.Attribute[int], value: int) -> None:
        if value > self.limit - self.buffer:
            raise ValueError(
                f"minimum={value} is too large; expected at most limit - buffer = {self.limit - self.buffer}"
            )


@attrs.frozen(kw_only=True)
class RepetitionPenaltyConfig(PluginSection):
    """Settings of `repetition_penalty`: 0 for a response without repeated n-grams, down to −penalty if the response is all repetition."""

    n: int = attrs.field(default=3, validator=AT_LEAST_ONE)
    """Length of the n-grams, in `unit`."""
    unit: Literal["words", "characters"] = "words"
    """Unit of the n-grams; characters suit languages without spaces."""
    free: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Share of repeated n-grams that is not penalised."""
    penalty: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """The largest penalty."""


@attrs.frozen(kw_only=True)
class InstructionFollowingConfig(PluginSection):
    """Settings of `instruction_following`, which checks the response against verifiable instructions."""

    scoring: Literal["all", "share"] = "all"
    """all: 1 if every instruction is followed, else 0; share: the share of instructions that are followed."""
    loose: bool = False
    """Also accept a response that complies without its first or last line, or without asterisks. Introductions and emphasis are then
    allowed.
    """
    score: float = 1.0
    """Factor by which the result is multiplied: the score for a result of 1."""
