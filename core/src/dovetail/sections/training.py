"""The sections on training: optimizer and engine of the policy, the critic, the reference and further models. Nothing here imports torch."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from dovetail.sections.adapter import PlannedAdapter
from dovetail.sections.fields import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    COUNT,
    JSON_VALUES,
    PluginSection,
    plugin_field,
)


@attrs.frozen(kw_only=True)
class OptimSection(PluginSection):
    """Base of every optimizer's config: the peak learning rate, and its schedule."""

    lr: float = attrs.field(default=1e-6, validator=attrs.validators.ge(0))
    """Peak learning rate."""
    weight_decay: float = attrs.field(default=0.01, validator=attrs.validators.ge(0))
    """Decoupled weight decay: a step takes lr · weight_decay of each weight off."""
    schedule: PluginSection = plugin_field(
        "schedule", "constant", factory=lambda: PluginSection(name="constant")
    )
    """Learning rate after warm-up."""
    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """Final learning rate of a falling schedule, as a share of the peak."""


def _override_config() -> Any:
    """The field of a role's overrides of its model's config."""
    return attrs.field(default=None, validator=attrs.validators.optional(JSON_VALUES))


def _optim(lr: float = 1e-6) -> Any:
    """The field of a role's optimizer: AdamW, by default with this learning rate."""
    return plugin_field("optimizer", "adamw", factory=lambda: OptimSection(name="adamw", lr=lr))


@attrs.frozen(kw_only=True)
class EngineSection(PluginSection):
    """Base of every training engine's config."""

    def mesh_axes(self) -> Mapping[str, int]:
        """Return the sizes of the mesh's axes besides dp, in rank order; dp takes the remaining ranks."""
        return {}

    def weight_kind(self) -> Literal["full", "adapter"]:
        """Return what the engine sends to the rollout: all weights, or an adapter, for rollouts with the capability `lora`."""
        return "full"

    def adapter_rank(self) -> int | None:
        """Return the rank of the adapter where `weight_kind` is "adapter"; None where it is not known."""
        return None

    def planned_adapter(self) -> PlannedAdapter:
        """Return the adapter that the engine trains, even where it sends merged weights; by default an adapter of the sent rank."""
        return PlannedAdapter(rank=self.adapter_rank())

    @property
    def host_states(self) -> bool:
        """Whether weights, gradients and optimizer state are in host memory while the engine computes."""
        return False

    def lighter(self) -> Iterable[Mapping[str, object]]:
        """List settings of the engine that each save accelerator memory by themselves, the cheapest first."""
        return ()

    def shards(self, ranks: int) -> int:
        """Return the number of ranks over which each parameter is divided.

        Raises:
            PlanError: the engine does not support this number of ranks.
        """
        return 1


@attrs.frozen(kw_only=True)
class TrainingSection:
    """How a model is trained, whichever engine does it."""

    optim: OptimSection = _optim()
    """Optimizer and schedule."""
    max_tokens_per_micro_batch: int = attrs.field(default=16384, validator=attrs.validators.ge(1))
    """Token budget of one forward and backward pass; the result does not depend on it."""
    grad_clip: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """Largest gradient norm; 0 clips nothing."""
    offload: bool = False
    """Keep parameters and optimizer off the accelerator while the role does not compute."""


@attrs.frozen(kw_only=True)
class ActorSection(TrainingSection):
    """The policy that is trained."""

    engine: EngineSection = plugin_field("engine", "fsdp2")
    """The training engine."""
    objective: PluginSection | None = plugin_field("objective", None)
    """The objective that it minimises; where absent, the policy loss of `algorithm` with its KL penalty and entropy bonus."""
    mini_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Prompts an optimizer step; None means the whole rollout batch."""
    epochs: int = attrs.field(default=1, validator=COUNT)
    """Passes over each rollout batch."""
    shuffle: bool = False
    """Cut mini-batches from another order of the prompts in every pass over a rollout batch."""
    max_kl: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Leave out a step's remaining updates once a mini-batch's KL to the old policy (nats a token) is above this."""


@attrs.frozen(kw_only=True)
class CriticSection(TrainingSection):
    """The value model; it exists only where something requires `values`, as the advantage estimator `gae` does."""

    optim: OptimSection = _optim(lr=1e-5)
    """Optimizer and schedule, of its own."""
    engine: EngineSection | None = plugin_field("engine", None)
    """The training engine; the actor's where absent."""
    objective: PluginSection | None = plugin_field("objective", None)
    """The objective that it minimises; where absent, the value loss, with `value_clip` and `loss_aggregation`."""
    path: str | None = None
    """Its starting checkpoint; the actor's where absent. The value head starts at 0 where there is none in it."""
    override_config: Mapping[str, Any] | None = _override_config()
    """As `model.override_config`, which holds where this is absent and `path` is absent or the same."""
    mini_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Prompts an optimizer step; the actor's where absent."""
    epochs: int | None = attrs.field(default=None, validator=attrs.validators.optional(COUNT))
    """Passes over each rollout batch; the actor's where absent."""
    value_clip: float | None = attrs.field(default=0.5, validator=ABOVE_ZERO)
    """How far a value may move from the one before the step's updates (PPO's value clipping); None for any."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """How the tokens' value losses become one number."""
    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """First steps of the run in which the critic alone is trained."""


@attrs.frozen(kw_only=True)
class FollowSection:
    """How a model that is not trained follows the actor: w ← decay · w + (1 − decay) · w_actor at the end of a step."""

    every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Steps of the run between two updates."""
    decay: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Share of its own weights that is kept at each update; 0 copies the actor's. With an adapter, each factor is averaged."""

    def __str__(self) -> str:
        when = "every step" if self.every == 1 else f"every {self.every} steps"
        if not self.decay:
            return f"is set to the actor {when}"
        return f"averages the actor {when} (decay {self.decay:g})"


@attrs.frozen(kw_only=True)
class RoleSection(TrainingSection):
    """A further model of the run. It is trained where it has an objective, and frozen where not."""

    engine: EngineSection | None = plugin_field("engine", None)
    """The engine that scores with it and trains it; the actor's where absent."""
    objective: PluginSection | None = plugin_field("objective", None)
    """The objective that it minimises in every step; where absent, it is frozen, without an adapter."""
    update: FollowSection | None = None
    """How a model without an objective follows the actor; absent: its weights never change."""
    path: str | None = None
    """Its checkpoint; the actor's starting weights where absent."""
    override_config: Mapping[str, Any] | None = _override_config()
    """As `model.override_config`, which holds where this is absent and `path` is absent or the same."""
    head: Literal["lm", "value"] = "lm"
    """Its last layer: a language model's head, or one value a token."""
    mini_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Prompts an optimizer step; None means the whole batch of a step."""
    epochs: int = attrs.field(default=1, validator=COUNT)
    """Passes over the batch of each step."""


@attrs.frozen(kw_only=True)
class RefSection:
    """The reference policy, which is not trained; it exists only where something requires `ref_log_probs`."""

    update: FollowSection | None = None
    """How it follows the actor (TR-DPO, arXiv 2404.09656); absent: its weights never change. If it follows an actor with an adapter, it
    is a separate model."""
    engine: EngineSection | None = plugin_field("engine", None)
    """The engine that scores with it; the actor's where absent."""
    path: str | None = None
    """Its checkpoint; the actor's starting weights where absent."""
    override_config: Mapping[str, Any] | None = _override_config()
    """As `model.override_config`, which holds where this is absent and `path` is absent or the same."""
    max_tokens_per_micro_batch: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Token budget of one pass; the actor's where absent."""
    offload: bool = False
    """Keep it off the accelerator while it does not compute."""
