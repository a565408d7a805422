"""The rollout's section of a config, which the config of every rollout engine extends. This module does not import torch."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs

from dovetail.errors import ConfigError
from dovetail.sections.adapter import PlannedAdapter
from dovetail.sections.fields import (
    ABOVE_ZERO,
    COUNT,
    TOKENS,
    VERBATIM,
    PluginSection,
    plugin_field,
)


@attrs.frozen(kw_only=True)
class ValidationSamplingSection:
    """Sampling in validation. Temperature 0 is greedy."""

    n: int = attrs.field(default=1, validator=COUNT)
    """Number of responses to each prompt."""
    temperature: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    """Divisor of the logits; 0 is greedy."""
    top_p: float = attrs.field(
        default=1.0, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Probability mass of nucleus sampling; 1 means all."""
    top_k: int = -1
    """Only the k most likely tokens; -1 means all."""
    max_response_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(TOKENS)
    )
    """Maximum tokens generated for a response; by default data.max_response_length."""
    pass_threshold: float = 0.5
    """Threshold of pass@k: a sample passes if its reward's `acc`, `accuracy` or `correct`, or else its score, is at least this."""


@attrs.frozen(kw_only=True)
class WeightCheckSection:
    """Fixed token sequences that rollout and trainer both score: their log-probabilities must agree."""

    every: int = attrs.field(default=10, validator=attrs.validators.ge(0))
    """Weight updates between checks, beginning with the first update; a check also follows every restart of an engine. 0 never checks.
    Engines without the capability `scores` are not checked."""
    sequences: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    """Number of sequences."""
    tokens: int = attrs.field(default=64, validator=attrs.validators.ge(2))
    """Tokens of each sequence, taken from the first training prompts, end to end."""
    tolerance: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Largest mean difference of log-probabilities, in nats a token, with each token weighted by the trainer's probability; None means
    1e-4 in float32, 0.05 in bfloat16."""


@attrs.frozen(kw_only=True)
class RolloutSection(PluginSection):
    """Base of every rollout engine's config."""

    n: int = attrs.field(default=8, validator=COUNT)
    """Number of responses to each prompt."""
    agent_loop: PluginSection | None = plugin_field("agent_loop", "single_turn")
    """The agent loop, which produces a sample: `single_turn`, one response to the prompt, or an episode of many turns."""
    temperature: float = attrs.field(default=1.0, validator=attrs.validators.ge(1e-6))
    """Divisor of the logits."""
    top_p: float = attrs.field(
        default=1.0, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Probability mass of nucleus sampling; 1 means all."""
    top_k: int = -1
    """Only the k most likely tokens; -1 means all."""
    stop: tuple[str, ...] = attrs.field(default=(), metadata={VERBATIM: True})
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own end of sequence."""
    ignore_eos: bool = False
    """Continue past the end of sequence up to the maximum length, for benchmarks."""
    replicas: int | None = attrs.field(default=None, validator=attrs.validators.optional(COUNT))
    """Number of engine replicas. None means one if the runtime uses only this process, else as many as the rollout's pool has ranks for."""
    weight_transport: PluginSection | None = plugin_field("weight_transport", None)
    """The transport of new weights to the engine; None leaves the choice to the runtime."""
    validation: ValidationSamplingSection = attrs.field(factory=ValidationSamplingSection)
    """Sampling in validation."""
    partial_rollout: bool = False
    """If a trainer generates ahead: interrupt running responses when weights are sent or the engine sleeps, and continue them under the new
    weights. If off, all running responses end first."""
    keep_cache: bool = False
    """With `partial_rollout`: when weights are sent, running responses stay in the engine and continue with the keys and values of the
    older weights, without recomputing them. Needs an engine with the capability `keeps_cache`."""
    stall_seconds: float = attrs.field(default=300.0, validator=attrs.validators.gt(0))
    """Seconds without a response or a score after which a waiting trainer logs the warning `rollout_stalled`, which says what is missing,
    and the metric `rollout/stalls`. The run continues to wait."""
    offload: bool = False
    """Keep the engine's weights and KV cache off the accelerator while it does not generate (sleep and wake)."""
    weight_check: WeightCheckSection = attrs.field(factory=WeightCheckSection)
    """The comparison of the engine's log-probabilities with the trainer's, after an update of weights."""
    max_restarts: int = attrs.field(default=2, validator=attrs.validators.ge(0))
    """Maximum number of consecutive restarts of failed replicas before the run stops."""

    @property
    def in_process(self) -> bool:
        """Whether the engine loads its weights in the worker's own process, not in child processes."""
        return True

    @property
    def starts_beside(self) -> bool:
        """Whether the rollout may start while training models load in the same process or on the same accelerators.

        An engine may return True only if it never measures free memory, or measures it while it holds the lock for loading
        (`dovetail.workers.loading`).
        """
        return False

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that the rollout's start imports in this process; if training models start concurrently, they are imported before."""
        return ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of running engines, one for each replica to join; empty if each replica starts its own engine."""
        return ()

    @property
    def joined(self) -> int:
        """Number of running engines that replicas join. Such replicas take no ranks. 0 if each replica starts its own engine."""
        return len(self.addresses)

    def joining(self, address: str) -> Self:
        """Return the config for one replica that joins the running engine at an address.

        Raises:
            ConfigError: engines of this kind can't be joined, or the address is not that of an engine.
        """
        raise ConfigError(
            f"no server can be added to the pool of rollout {self.name!r}: it can't connect to engines that are already running",
            hint="choose a rollout whose config has `urls`, such as vllm or sglang",
        )

    def ranks_per_replica(self) -> int:
        """Return the number of ranks (accelerators, or CPU processes) of the pool that one replica takes."""
        return 1

    def memory_share(self) -> tuple[str, float] | None:
        """Return the key and value of the setting for the engine's share of accelerator memory; None if the engine takes what it needs."""
        return None

    @property
    def bounds_cache(self) -> bool:
        """Whether the engine's memory share is limited to what the run's samples fill (`PluginContext.cache_tokens`)."""
        return False

    def most_running(self) -> int | None:
        """Return the maximum number of samples that a replica generates concurrently; None if the engine decides."""
        return None

    def cache_problem(self) -> str | None:
        """Return why the engine can't keep keys and values over a weight update under this config; None if it can.

        Called for engines with the capability `keeps_cache`. In the error, the text follows the engine's name.
        """
        return None

    def truncation(self) -> Mapping[str, tuple[object, object]]:
        """Return the settings in effect that truncate the sampling distribution: field → (value, value without effect).

        An engine with a further setting of this kind, such as a min-p, adds it:
        `{**super().truncation(), **({"min_p": (self.min_p, 0.0)} if self.min_p else {})}`.
        """
        found: dict[str, tuple[object, object]] = {}
        if self.top_p < 1:
            found["top_p"] = (self.top_p, 1.0)
        if self.top_k > 0:
            found["top_k"] = (self.top_k, -1)
        return found

    def adapter_problem(self, rank: int | None) -> str | None:
        """Return why the engine can't apply adapters of this rank under this config, and the fix; None if it can, or `rank` is None.

        Called for engines with the capability `lora`.
        """
        return None

    def unfit_adapter(self, adapter: PlannedAdapter) -> str | None:
        """Return why the engine can't apply this adapter under this config; None if it can, as far as known.

        Called for engines with the capability `lora`. In the error, the text follows the engine's name. By default only the rank is judged,
        by `adapter_problem`.
        """
        return self.adapter_problem(adapter.rank)
