"""The rollout's section of a config, which the config of every rollout engine extends. Nothing here imports torch."""
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
    """How validation samples. Temperature 0 is greedy."""

    n: int = attrs.field(default=1, validator=COUNT)
    """Responses a prompt."""
    temperature: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    """Divisor of the logits; 0 is greedy."""
    top_p: float = attrs.field(
        default=1.0, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Nucleus mass."""
    top_k: int = -1
    """Only the k most likely tokens; -1 means all."""
    max_response_length: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(TOKENS)
    )
    """Most tokens generated for a response; data.max_response_length where absent."""
    pass_threshold: float = 0.5
    """pass@k: a sample passes where its reward's `acc`, `accuracy` or `correct`, or else its score, is at least this."""


@attrs.frozen(kw_only=True)
class WeightCheckSection:
    """Fixed token sequences that rollout and trainer both score: their log-probabilities must agree."""

    every: int = attrs.field(default=10, validator=attrs.validators.ge(0))
    """Updates from one check to the next, beginning with the first; a check also follows every restart. 0 never checks. Engines without the
    capability `scores` are not checked."""
    sequences: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    """Number of sequences."""
    tokens: int = attrs.field(default=64, validator=attrs.validators.ge(2))
    """Tokens of each sequence, taken from the first training prompts, end to end."""
    tolerance: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Largest mean difference, in nats a token, with each token weighted by the trainer's probability; None means 1e-4
    in float32, 0.05 in bfloat16."""


@attrs.frozen(kw_only=True)
class RolloutSection(PluginSection):
    """Base of every rollout engine's config."""

    n: int = attrs.field(default=8, validator=COUNT)
    """Responses a prompt."""
    agent_loop: PluginSection | None = plugin_field("agent_loop", "single_turn")
    """The agent loop, which produces a sample: `single_turn`, one response to the prompt, or an episode of many turns."""
    temperature: float = attrs.field(default=1.0, validator=attrs.validators.ge(1e-6))
    """Logits are divided by it."""
    top_p: float = attrs.field(
        default=1.0, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Nucleus mass."""
    top_k: int = -1
    """Only the k most likely tokens; -1 means all."""
    stop: tuple[str, ...] = attrs.field(default=(), metadata={VERBATIM: True})
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, besides the model's own end of sequence."""
    ignore_eos: bool = False
    """Go on past the end of sequence up to the maximum length: for benchmarks."""
    replicas: int | None = attrs.field(default=None, validator=attrs.validators.optional(COUNT))
    """Engine replicas; None means one in this process, or as many as fit the ranks of its pool."""
    weight_transport: PluginSection | None = plugin_field("weight_transport", None)
    """How new weights reach the engine; None leaves the choice to the runtime."""
    validation: ValidationSamplingSection = attrs.field(factory=ValidationSamplingSection)
    """Sampling in validation."""
    partial_rollout: bool = False
    """Where a trainer generates ahead: cut running responses short when weights are sent or the engine sleeps, and continue them
    under the new weights. Else they end first, and the longest is waited for."""
    keep_cache: bool = False
    """With `partial_rollout`: when weights are sent, running responses stay in the engine and go on with the keys and values that
    older weights made, which costs no computing anew. Needs an engine with the capability `keeps_cache`."""
    stall_seconds: float = attrs.field(default=300.0, validator=attrs.validators.gt(0))
    """Seconds without a response or a score after which a waiting trainer logs what it waits for and where: the warning
    `rollout_stalled`, and the metric `rollout/stalls`. The run continues to wait."""
    offload: bool = False
    """Keep the engine's weights and KV cache off the accelerator while it does not generate (sleep and wake)."""
    weight_check: WeightCheckSection = attrs.field(factory=WeightCheckSection)
    """The comparison of the engine's log-probabilities with the trainer's, after an update of weights."""
    max_restarts: int = attrs.field(default=2, validator=attrs.validators.ge(0))
    """How often in a row replicas that failed are started again before the run stops."""

    @property
    def in_process(self) -> bool:
        """Whether the engine loads its weights in the worker's own process, and not in processes that it starts."""
        return True

    @property
    def starts_beside(self) -> bool:
        """Whether the rollout may start while training models load in the same process or on the same accelerators. Then it measures
        free memory only while it holds the turn to load (`dovetail.workers.loading`), or not at all.
        """
        return False

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that the rollout imports when it starts in a worker's process, beside other roles."""
        return ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of running engines that the replicas join, one each; empty where each replica starts its own."""
        return ()

    @property
    def joined(self) -> int:
        """The number of running engines that the replicas join, which take no ranks; 0 where each replica starts its own."""
        return len(self.addresses)

    def joining(self, address: str) -> Self:
        """Return the config for one replica that joins the running engine at an address.

        Raises:
            ConfigError: engines of this kind can't be joined, or the address is not one of an engine.
        """
        raise ConfigError(
            f"rollout {self.name!r} joins no engines that run already: no server can be added to its pool",
            hint="choose a rollout whose config has `urls`, such as vllm or sglang",
        )

    def ranks_per_replica(self) -> int:
        """Return ranks of its pool (accelerators, or CPU processes) that one replica takes."""
        return 1

    def memory_share(self) -> tuple[str, float] | None:
        """Return the setting by which the engine takes a share of an accelerator's memory, and that share; None where it takes what it
        needs.
        """
        return None

    @property
    def bounds_cache(self) -> bool:
        """Whether the engine takes no more of its share than the run's samples fill (`PluginContext.cache_tokens`)."""
        return False

    def most_running(self) -> int | None:
        """Return the maximum of samples that a replica generates concurrently; further ones wait. None where the engine decides."""
        return None

    def cache_problem(self) -> str | None:
        """Return why an engine with the capability `keeps_cache` can't keep keys and values over an update under this config, in words that
        follow its name; None where it can.
        """
        return None

    def truncation(self) -> Mapping[str, tuple[object, object]]:
        """Return the settings that truncate the sampling distribution: field → its value, and its neutral value. Only those in effect.

        An engine with a setting of its own for that, such as a min-p, adds it:
        `{**super().truncation(), **({"min_p": (self.min_p, 0.0)} if self.min_p else {})}`.
        """
        found: dict[str, tuple[object, object]] = {}
        if self.top_p < 1:
            found["top_p"] = (self.top_p, 1.0)
        if self.top_k > 0:
            found["top_k"] = (self.top_k, -1)
        return found

    def adapter_problem(self, rank: int | None) -> str | None:
        """Return why an engine with the capability `lora` can't apply adapters of this rank under this config, and the fix; None where it
        can, or the rank is unknown.
        """
        return None

    def unfit_adapter(self, adapter: PlannedAdapter) -> str | None:
        """Return why an engine with the capability `lora` can't apply such adapters under this config, in words that follow its
        name; None where it can, as far as is known. By default the rank alone is judged, by `adapter_problem`.
        """
        return self.adapter_problem(adapter.rank)
