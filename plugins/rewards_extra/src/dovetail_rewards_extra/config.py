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
    """Score of a response of the right form."""
    answer_score: float = attrs.field(default=0.0)
    """Score that is added where the group `answer` equals the ground truth, ignoring white space at its ends."""
    miss_score: float = 0.0
    """Score of a response of another form."""

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
    r"""Places where the letter is searched, in this order: the last `\boxed{…}`; the last `<answer>…</answer>`; after the last
    `answer is` or `Answer:`; a last line that holds the letter alone; the last letter that stands alone anywhere."""
    score: float = 1.0
    """Score of the right letter."""
    format_score: float = 0.0
    """Score of another letter."""
    miss_score: float = 0.0
    """Score of a response that chooses no letter."""


@attrs.frozen(kw_only=True)
class FuzzyMatchConfig(PluginSection):
    """Similarity of the response to the ground truth."""

    metric: Literal["token_f1", "edit"] = "token_f1"
    """token_f1: harmonic mean of precision and recall of words; edit: 1 less the edit distance over the longer length."""
    normalise: bool = True
    """Ignore case, punctuation, the articles a, an and the, and runs of white space."""
    extract: str | None = attrs.field(default=None, validator=is_pattern, metadata={VERBATIM: True})
    """Regular expression whose last match is compared (its first group where it has one); None compares the whole response."""
    threshold: float | None = attrs.field(default=None, validator=attrs.validators.optional(_SHARE))
    """Least similarity with a result of 1, others having 0; None takes the similarity itself."""
    score: float = 1.0
    """Score of a similarity of 1."""


@attrs.frozen(kw_only=True)
class JsonSchemaConfig(PluginSection):
    """The answer is JSON of a given form."""

    schema: Mapping[str, Any] | None = attrs.field(default=None, metadata={VERBATIM: True})
    """JSON Schema of every answer; None where each row's ground truth is the schema, or where only values are compared."""
    compare: bool = False
    """Compare the answer with the ground truth, a value or its JSON text."""
    extract: Literal["auto", "whole", "fenced"] = "auto"
    """Place of the JSON: the whole response; the last fenced block; auto: the last fenced block, else the whole response."""
    parse_score: float = 0.0
    """Score of an answer that is JSON."""
    valid_score: float = 1.0
    """Score that is added for a valid answer."""
    fields_score: float = 0.0
    """Score that is added, multiplied by the share of right fields: valid by the schema, or, with `compare`, equal to the ground truth's.
    """


@attrs.frozen(kw_only=True)
class LengthPenaltyConfig(PluginSection):
    """0 for a response of a fitting length, down to −penalty for one that is too long or too short."""

    unit: Literal["words", "characters", "tokens"] = "words"
    """Unit of length; in an episode, `tokens` includes tool tokens. `algorithm.overlong_penalty` is a penalty by tokens outside the reward.
    """
    limit: int = attrs.field(validator=AT_LEAST_ONE)
    """Length from which the whole penalty is due."""
    buffer: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Lengths before `limit` over which the penalty grows evenly."""
    minimum: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Length below which the penalty grows evenly, up to the whole penalty for an empty response."""
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
    """Length of the runs, in units."""
    unit: Literal["words", "characters"] = "words"
    """Unit of the runs; characters suit languages without spaces."""
    free: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Share of repeated runs that costs nothing."""
    penalty: float = attrs.field(default=1.0, validator=NOT_NEGATIVE)
    """The largest penalty."""


@attrs.frozen(kw_only=True)
class InstructionFollowingConfig(PluginSection):
    """Compliance of the response with instructions that can be checked."""

    scoring: Literal["all", "share"] = "all"
    """all: 1 where every instruction is kept, else 0; share: the share of instructions kept."""
    loose: bool = False
    """Also accept a response that complies without its first or last line, or without asterisks, so that an introduction or emphasis is no
    fault.
    """
    score: float = 1.0
    """Score of a full result."""
