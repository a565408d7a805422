"""Config classes of the reward managers. This module imports nothing but config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from typing import Any

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, PluginSection, plugin_field


def is_url(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse a value that is not an HTTP URL."""
    if not value.startswith(("http://", "https://")):
        raise ValueError(
            f"{attribute.name}={value!r} is not an HTTP address; expected one that starts with http:// or https://"
        )


@attrs.frozen(kw_only=True)
class CachingConfig(PluginSection):
    """Base of the configs of reward managers that call reward functions: the size of their cache of scores."""

    cache_size: int = attrs.field(default=16384, validator=NOT_NEGATIVE)
    """Maximum number of cached scores of reward functions declared `pure`, keyed by their arguments; 0 turns the cache off."""


@attrs.frozen(kw_only=True)
class GroupConfig(CachingConfig):
    """Settings of `group`, which scores all responses to a prompt together with functions that compare them."""

    workers: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Maximum number of concurrent calls of reward functions."""
    max_hung: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Maximum number of timed-out calls that still run. At this number, further samples fail without a call."""
    both_orders: bool = True
    """Compare each pair in both orders and take the mean, so that a judge's preference for the first response cancels out."""


@attrs.frozen(kw_only=True)
class BatchConfig(CachingConfig):
    """Settings of `batch`, which calls reward functions on lists of samples."""

    size: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Maximum number of samples in one call of a function."""
    wait_ms: float = attrs.field(default=20.0, validator=NOT_NEGATIVE)
    """Milliseconds that a sample waits for further samples before a smaller call is made."""
    calls: int = attrs.field(default=1, validator=AT_LEAST_ONE)
    """Maximum number of concurrent calls of reward functions; further samples wait."""
    split: bool = True
    """If a call raises, call again with each half of the samples, until the failing samples are isolated. False fails all samples of the
    call.
    """
    max_hung: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Maximum number of timed-out calls that still run. At this number, further samples fail without a call."""


@attrs.frozen(kw_only=True)
class ParallelConfig(CachingConfig):
    """Settings of `parallel`, whose worker processes are killed at a time-out."""

    workers: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """The number of processes; None starts one for each core that this process may use."""
    start_timeout: float = attrs.field(default=120.0, validator=ABOVE_ZERO)
    """Seconds that a worker may take to start and to construct its functions."""


@attrs.frozen(kw_only=True)
class BudgetConfig(CachingConfig):
    """The request budget of a scoring service; unlimited by default."""

    requests_per_minute: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Maximum number of calls of the service in any minute."""
    tokens_per_minute: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Maximum number of tokens in any minute, estimated from the text and then corrected by the usage that the service reports."""
    workers: int = attrs.field(default=32, validator=AT_LEAST_ONE)
    """Maximum number of concurrent calls."""
    window: float = attrs.field(default=60.0, validator=[ABOVE_ZERO, attrs.validators.le(60)])
    """The budget's period in seconds. A shorter period, with a proportional part of the budget, spreads the calls more evenly."""
    characters_per_token: float = attrs.field(default=4.0, validator=ABOVE_ZERO)
    """Characters per token, used to estimate the tokens of the sent text."""
    tokens_per_request: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Tokens added to the estimate of each call, for the judge's own instructions and answer."""


@attrs.frozen(kw_only=True)
class NaiveConfig(BudgetConfig):
    """Settings of `naive`, which runs reward functions in this process."""

    workers: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Maximum number of samples scored at once, within reward.concurrency. A small number leaves the Python interpreter free for
    generation; a large number suits functions that wait for a network.
    """
    max_hung: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Maximum number of timed-out calls that still run. At this number, further samples fail without a call."""


@attrs.frozen(kw_only=True)
class ScorerSection:
    """One scorer of `hybrid`: a reward function with its manager, weight and gate."""

    function: PluginSection | None = plugin_field("reward_function", None)
    """The scorer's reward function; None takes the function that the reward section selects for the row."""
    manager: PluginSection = plugin_field("reward_manager", "naive")
    """The manager that runs the function: `parallel` for rules that need a process, `judge` for a language model, …"""
    weight: float = 1.0
    """Weight of the scorer's score in the sum; with 0, the score is only reported."""
    gate: float | None = None
    """Minimum score required for later scorers to run; None for no gate."""
    skipped: float = 0.0
    """Value of the scorer's component for a sample that an earlier gate stopped."""


@attrs.frozen(kw_only=True)
class HybridConfig(PluginSection):
    """Settings of `hybrid`, a weighted sum of several scorers, with gates."""

    scorers: dict[str, ScorerSection] = attrs.field(validator=attrs.validators.min_len(1))
    """The scorers by name, in the order in which they run; each name is a component of the reward."""
    gated_score: float | None = 0.0
    """The score of a sample that a gate stopped; None takes the weighted sum of its components."""


@attrs.frozen(kw_only=True)
class RemoteConfig(PluginSection):
    """Settings of `remote`, which scores samples with an HTTP service (`url`) or with processes on the runtime's machines (`workers`)."""

    url: str | None = attrs.field(default=None, validator=attrs.validators.optional(is_url))
    """The address to which batches are posted."""
    workers: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """The number of worker processes that the runtime starts on its machines, instead of `url`; needs `runtime.name=ray`."""
    manager: PluginSection = plugin_field("reward_manager", "naive")
    """The reward manager that each worker runs: `naive` or `parallel`, which call the run's reward functions; `reward_model`; …"""
    accelerators: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Accelerators that each worker reserves, in addition to those of the runtime's pools."""
    cpus: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """CPUs that each worker reserves; 0 shares CPUs with other processes."""
    restarts: int = attrs.field(default=3, validator=NOT_NEGATIVE)
    """Maximum number of consecutive restarts of a worker, counted until the worker answers again."""
    start_timeout: float = attrs.field(default=300.0, validator=ABOVE_ZERO)
    """Seconds that workers may take to start."""
    size: int = attrs.field(default=32, validator=AT_LEAST_ONE)
    """Maximum number of samples in a request."""
    wait_ms: float = attrs.field(default=20.0, validator=NOT_NEGATIVE)
    """Milliseconds that a sample waits for further samples before a smaller request is made."""
    calls: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Maximum number of concurrent requests, to the service or to each worker."""
    auth_env: str | None = None
    """Environment variable that holds the service's credential; None sends no credential."""
    auth_header: str = "Authorization"
    """Header that carries the credential."""
    auth_scheme: str = "Bearer"
    """Word before the credential in the header; may be empty."""
    response_ids: bool = attrs.field(default=False)
    """Whether to send the response's token ids to the service of `url`; `workers` always get them."""

    @response_ids.validator
    def _has_one_place(self, _: attrs.Attribute[bool], value: bool) -> None:
        if (self.url is None) == (self.workers is None):
            given = (
                "neither `url` nor `workers` is"
                if self.url is None
                else "`url` and `workers` are both"
            )
            raise ValueError(
                f"{given} set; reward manager `remote` needs exactly one: `url` for a scoring service, or `workers` for worker processes"
            )
