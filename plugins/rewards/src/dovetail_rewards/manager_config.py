"""Config classes of the reward managers. Nothing here imports more than the config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from typing import Any

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, PluginSection, plugin_field


def is_url(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    """Refuse what is not an address of an HTTP server."""
    if not value.startswith(("http://", "https://")):
        raise ValueError(
            f"{attribute.name}={value!r} is not an address that starts with http:// or https://"
        )


@attrs.frozen(kw_only=True)
class CachingConfig(PluginSection):
    """Settings common to all managers that call reward functions."""

    cache_size: int = attrs.field(default=16384, validator=NOT_NEGATIVE)
    """Scores kept of functions that say that they are pure, by content; 0 keeps none."""


@attrs.frozen(kw_only=True)
class GroupConfig(CachingConfig):
    """Whole groups at once: functions that score by comparison."""

    workers: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Calls at once."""
    max_hung: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Calls that were given up and still run, at most; beyond it samples fail without a call."""
    both_orders: bool = True
    """Compare each pair in both orders, and take the mean: a judge that prefers the first response then prefers nobody."""


@attrs.frozen(kw_only=True)
class BatchConfig(CachingConfig):
    """One call on lists."""

    size: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Most samples in a call."""
    wait_ms: float = attrs.field(default=20.0, validator=NOT_NEGATIVE)
    """Milliseconds that a sample waits for others before a call is made with fewer."""
    calls: int = attrs.field(default=1, validator=AT_LEAST_ONE)
    """Calls at once; while all run, samples gather."""
    split: bool = True
    """Where a call raises, call again with each half, until those are found that it can't score. False fails them all."""
    max_hung: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Calls that were given up and still run, at most; beyond it samples fail without a call."""


@attrs.frozen(kw_only=True)
class ParallelConfig(CachingConfig):
    """Worker processes, which a time-out kills."""

    workers: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Processes; by default one for each core that this process may use."""
    start_timeout: float = attrs.field(default=120.0, validator=ABOVE_ZERO)
    """Seconds that a worker may take to start and to make its functions."""


@attrs.frozen(kw_only=True)
class BudgetConfig(CachingConfig):
    """The request budget of a service that scores; without a bound there is none."""

    requests_per_minute: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Calls in any minute, at most."""
    tokens_per_minute: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Tokens in any minute, at most: estimated from the text, and corrected by what the service says that a call used."""
    workers: int = attrs.field(default=32, validator=AT_LEAST_ONE)
    """Calls at once."""
    window: float = attrs.field(default=60.0, validator=[ABOVE_ZERO, attrs.validators.le(60)])
    """Seconds over which the budget holds; fewer spread the calls more evenly, with the budget cut in proportion."""
    characters_per_token: float = attrs.field(default=4.0, validator=ABOVE_ZERO)
    """Characters of the sent text per token, by which its tokens are estimated."""
    tokens_per_request: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """Added to the estimate of each call: the judge's own instructions and answer."""


@attrs.frozen(kw_only=True)
class NaiveConfig(BudgetConfig):
    """The reward manager that runs functions in this process."""

    workers: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Samples scored at once, as far as reward.concurrency allows. Few leave the interpreter to generation; many suit functions that wait for a network."""
    max_hung: int = attrs.field(default=64, validator=AT_LEAST_ONE)
    """Calls that were given up and still run, at most; beyond it samples fail without a call."""


@attrs.frozen(kw_only=True)
class ScorerSection:
    """One part of a composed reward."""

    function: PluginSection | None = plugin_field("reward_function", None)
    """Its function; None takes the row's own, as the reward section chooses it."""
    manager: PluginSection = plugin_field("reward_manager", "naive")
    """What runs it: `parallel` for rules that need a process, `judge` for a model that is asked, …"""
    weight: float = 1.0
    """What its score is multiplied by in the sum; 0 only measures."""
    gate: float | None = None
    """Its score must reach this, or what comes after it is not run."""
    skipped: float = 0.0
    """The component of a sample that a gate has kept from it."""


@attrs.frozen(kw_only=True)
class HybridConfig(PluginSection):
    """A weighted sum of several scorers, with gates."""

    scorers: dict[str, ScorerSection] = attrs.field(validator=attrs.validators.min_len(1))
    """The parts by name, in the order in which they run; each name is a component of the reward."""
    gated_score: float | None = 0.0
    """The score of a sample that a gate stopped; None takes the weighted sum of its components."""


@attrs.frozen(kw_only=True)
class RemoteConfig(PluginSection):
    """Scoring elsewhere: by a service over HTTP (`url`), or by processes on the runtime's machines (`workers`)."""

    url: str | None = attrs.field(default=None, validator=attrs.validators.optional(is_url))
    """Where batches are posted."""
    workers: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """In place of `url`: processes that the runtime starts, spread over its machines; needs `runtime.name=ray`."""
    manager: PluginSection = plugin_field("reward_manager", "naive")
    """What each worker scores with: `naive` or `parallel` over the run's functions, `reward_model`, …"""
    accelerators: int = attrs.field(default=0, validator=NOT_NEGATIVE)
    """Accelerators that each worker has for itself, beside those of the runtime's pools."""
    cpus: float = attrs.field(default=0.0, validator=NOT_NEGATIVE)
    """CPUs that each worker reserves; 0 takes turns with whoever is there."""
    restarts: int = attrs.field(default=3, validator=NOT_NEGATIVE)
    """How often in a row, without an answer in between, a worker that died is started again."""
    start_timeout: float = attrs.field(default=300.0, validator=ABOVE_ZERO)
    """Seconds that workers may take to be ready."""
    size: int = attrs.field(default=32, validator=AT_LEAST_ONE)
    """Most samples in a request."""
    wait_ms: float = attrs.field(default=20.0, validator=NOT_NEGATIVE)
    """Milliseconds that a sample waits for others before a request is made with fewer."""
    calls: int = attrs.field(default=8, validator=AT_LEAST_ONE)
    """Requests at once, to each worker where there are several."""
    auth_env: str | None = None
    """Environment variable that holds the service's credential; None sends none."""
    auth_header: str = "Authorization"
    """Header that carries it."""
    auth_scheme: str = "Bearer"
    """Word before it; empty for none."""
    response_ids: bool = attrs.field(default=False)
    """Send the response's token ids too; workers get them in any case."""

    @response_ids.validator
    def _has_one_place(self, _: attrs.Attribute[bool], value: bool) -> None:
        if (self.url is None) == (self.workers is None):
            given = "neither" if self.url is None else "both"
            raise ValueError(
                f"`remote` scores by a service (url) or by worker processes (workers), and {given} is set"
            )
