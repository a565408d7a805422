"""Config class of the judge. Nothing here imports more than the config sections."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, VERBATIM
from dovetail_rewards.config import is_pattern
from dovetail_rewards.manager_config import BudgetConfig, is_url


@attrs.frozen(kw_only=True)
class JudgeConfig(BudgetConfig):
    """A generative reward model: a language model behind an OpenAI-compatible endpoint judges each response in words."""

    url: str = attrs.field(validator=is_url)
    """The base of the endpoint, such as `http://127.0.0.1:8000/v1`; `/chat/completions` is added."""
    model: str = attrs.field()
    """The judge's model name at the endpoint."""
    template: str = attrs.field(metadata={VERBATIM: True})
    """The question to the judge: a Jinja template over `prompt`, `messages`, `response`, `ground_truth`, `data_source` and `extra_info`, or
    the path of a file that holds one.
    """
    system: str | None = attrs.field(default=None, metadata={VERBATIM: True})
    """The judge's system message: a template or a file's path; None sends none."""
    parse: Literal["regex", "json"] = "regex"
    """The place of the verdict: the last match of `pattern`, or `field` of the last JSON object."""
    pattern: str = attrs.field(
        default=r"(?i)score[^\w+.-]*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)",
        validator=is_pattern,
        metadata={VERBATIM: True},
    )
    """Regular expression; its group `score` is the verdict, else its first group, else the whole match."""
    field: str = "score"
    """Key of the verdict in the JSON object."""
    labels: dict[str, float] = attrs.field(factory=dict)
    """Verdicts in words with their scores, such as `{correct: 1, wrong: 0}`, ignoring case; empty: verdicts are numbers."""
    low: float | None = None
    """Smallest valid verdict; a lower one is no score."""
    high: float | None = None
    """Largest valid verdict; a higher one is no score."""
    normalise: bool = attrs.field(default=False)
    """Map verdicts from `low` … `high` to 0 … 1."""
    votes: int = attrs.field(default=1, validator=AT_LEAST_ONE)
    """The number of judgements of each response."""
    min_votes: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """The number of judgements that must succeed for a score; None: all of them."""
    aggregate: Literal["mean", "median", "majority"] = "mean"
    """Rule that combines judgements into one score; majority takes the most frequent, and of equally frequent ones the lowest."""
    temperature: float | None = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Sampling temperature of the judge; None leaves it to the endpoint."""
    max_tokens: int | None = attrs.field(default=1024, validator=AT_LEAST_ONE)
    """Maximum tokens of a judgement; None leaves it to the endpoint."""
    extra_body: dict[str, Any] = attrs.field(factory=dict)
    """Further keys of the request, such as `{response_format: {type: json_object}}`."""
    tries: int = attrs.field(default=3, validator=AT_LEAST_ONE)
    """Requests for a judgement before it fails. A request is repeated after a failed connection, a time-out, a retryable status, or, where
    `temperature` is not 0, an answer without a verdict.
    """
    backoff: float = attrs.field(default=0.5, validator=NOT_NEGATIVE)
    """Seconds before the second request; doubles with each. the endpoint's `Retry-After` is used where it is longer."""
    request_timeout: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Seconds for one request; None leaves it to reward.timeout, which holds for a sample's requests together."""
    cache_size: int = attrs.field(default=16384, validator=NOT_NEGATIVE)
    """The number of cached scores where `temperature` is 0, keyed by the request to the judge; 0 caches none."""
    auth_env: str | None = attrs.field(default=None)
    """Environment variable that holds the API key, sent as a bearer token; None sends none."""

    @normalise.validator
    def _has_bounds(self, _: attrs.Attribute[bool], value: bool) -> None:
        bounds = (self.low, self.high)
        if value and (None in bounds or self.low >= self.high):  # type: ignore[operator]
            raise ValueError(
                f"normalise=true needs low < high; they are {self.low} and {self.high}"
            )

    @temperature.validator
    def _votes_differ(self, _: attrs.Attribute[Any], value: float | None) -> None:
        if value == 0 and self.votes > 1:
            raise ValueError(
                f"temperature=0 makes all of votes={self.votes} the same; set a temperature above 0, or votes=1"
            )

    @min_votes.validator
    def _within_votes(self, _: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None and value > self.votes:
            raise ValueError(f"min_votes={value} is more than votes={self.votes}")
