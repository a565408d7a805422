"""Config class of the judge. This module imports nothing but config sections."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, VERBATIM
from dovetail_rewards.config import is_pattern
from dovetail_rewards.manager_config import BudgetConfig, is_url


@attrs.frozen(kw_only=True)
class JudgeConfig(BudgetConfig):
    """Settings of `judge`, in which a language model behind an OpenAI-compatible endpoint scores each response."""

    url: str = attrs.field(validator=is_url)
    """The endpoint's base URL, such as `http://127.0.0.1:8000/v1`; `/chat/completions` is appended."""
    model: str = attrs.field()
    """The judge's model name at the endpoint."""
    template: str = attrs.field(metadata={VERBATIM: True})
    """The user message to the judge: a Jinja template over `prompt`, `messages`, `response`, `ground_truth`, `data_source` and
    `extra_info`, or the path of a template file.
    """
    system: str | None = attrs.field(default=None, metadata={VERBATIM: True})
    """The judge's system message: a template or a template file's path; None sends no system message."""
    parse: Literal["regex", "json"] = "regex"
    """Place of the verdict in the judge's answer. regex: the last match of `pattern`; json: `field` of the last JSON object."""
    pattern: str = attrs.field(
        default=r"(?i)score[^\w+.-]*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)",
        validator=is_pattern,
        metadata={VERBATIM: True},
    )
    """Regular expression for the verdict: its group `score`, else its first group, else the whole match."""
    field: str = "score"
    """Key of the verdict in the JSON object."""
    labels: dict[str, float] = attrs.field(factory=dict)
    """Verdict words and their scores, such as `{correct: 1, wrong: 0}`, ignoring case; if empty, verdicts are numbers."""
    low: float | None = None
    """Smallest valid verdict; an answer with a lower number counts as an answer without a verdict. None sets no limit."""
    high: float | None = None
    """Largest valid verdict; an answer with a higher number counts as an answer without a verdict. None sets no limit."""
    normalise: bool = attrs.field(default=False)
    """Map verdicts from `low` … `high` to 0 … 1."""
    votes: int = attrs.field(default=1, validator=AT_LEAST_ONE)
    """The number of judgements of each response."""
    min_votes: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """The number of judgements that must succeed for a score; None requires all `votes`."""
    aggregate: Literal["mean", "median", "majority"] = "mean"
    """Rule that combines judgements into one score. majority takes the most frequent verdict; in a tie, the lowest of the most frequent."""
    temperature: float | None = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Sampling temperature of the judge; None takes the endpoint's default."""
    max_tokens: int | None = attrs.field(default=1024, validator=AT_LEAST_ONE)
    """Maximum tokens of a judgement; None takes the endpoint's default."""
    extra_body: dict[str, Any] = attrs.field(factory=dict)
    """Further keys of the request, such as `{response_format: {type: json_object}}`."""
    tries: int = attrs.field(default=3, validator=AT_LEAST_ONE)
    """Maximum requests for one judgement. A request is repeated after a failed connection, a time-out or a retryable status; if
    `temperature` is not 0, also after an answer without a verdict.
    """
    backoff: float = attrs.field(default=0.5, validator=NOT_NEGATIVE)
    """Seconds before the second request; doubled before each further request. A longer `Retry-After` of the endpoint takes precedence."""
    request_timeout: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Seconds for one request; None sets no limit but reward.timeout, which holds for a sample's requests together."""
    cache_size: int = attrs.field(default=16384, validator=NOT_NEGATIVE)
    """Maximum number of cached scores, keyed by the request to the judge; 0 turns the cache off. Used only if `temperature` is 0."""
    auth_env: str | None = attrs.field(default=None)
    """Environment variable that holds the API key, sent as a bearer token; None sends no key."""

    @normalise.validator
    def _has_bounds(self, _: attrs.Attribute[bool], value: bool) -> None:
        bounds = (self.low, self.high)
        if value and (None in bounds or self.low >= self.high):  # type: ignore[operator]
            raise ValueError(
                f"normalise=true needs bounds with low < high; low is {self.low} and high is {self.high}"
            )

    @temperature.validator
    def _votes_differ(self, _: attrs.Attribute[Any], value: float | None) -> None:
        if value == 0 and self.votes > 1:
            raise ValueError(
                f"temperature=0 makes all {self.votes} votes (votes={self.votes}) equal; set a temperature above 0, or votes=1"
            )

    @min_votes.validator
    def _within_votes(self, _: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None and value > self.votes:
            raise ValueError(
                f"min_votes={value} is more than votes={self.votes}; expected at most {self.votes}"
            )
