"""The sections on training: optimizer and engine of the policy, the critic, the reference and further models. This module does not import torch."""
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
    """Decoupled weight decay: a step subtracts lr · weight_decay · weight from each weight."""
    schedule: PluginSection = plugin_field(
        "schedule", "constant", factory=lambda: PluginSection(name="constant")
    )
    """Schedule of the learning rate after warm-up."""
    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """Final learning rate of a falling schedule, as a share of the peak."""


def _override_config() -> Any:
    """Return the attrs field `override_config` of a role: values that replace those of its model's config.json."""
    return attrs.field(default=None, validator=attrs.validators.optional(JSON_VALUES))


def _optim(lr: float = 1e-6) -> Any:
    """Return the field of a role's optimizer, by default AdamW with this learning rate."""
    return plugin_field("optimizer", "adamw", factory=lambda: OptimSection(name="adamw", lr=lr))


@attrs.frozen(kw_only=True)
class EngineSection(PluginSection):
    """Base of every training engine's config."""

    def mesh_axes(self) -> Mapping[str, int]:
        """Return the sizes of the mesh's axes besides dp (data parallelism), in rank order; dp takes the remaining ranks."""
        return {}

    def weight_kind(self) -> Literal["full", "adapter"]:
        """Return what the engine sends to the rollout: all weights, or only an adapter, which needs the rollout capability `lora`."""
        return "full"

    def adapter_rank(self) -> int | None:
        """Return the rank of the sent adapter if `weight_kind` is "adapter"; None if unknown."""
        return None

    def planned_adapter(self) -> PlannedAdapter:
        """Return the adapter that the engine trains, even if merged weights are sent; by default an adapter of rank `adapter_rank`."""
        return PlannedAdapter(rank=self.adapter_rank())

    @property
    def host_states(self) -> bool:
        """Whether weights, gradients and optimizer state are in host memory while the engine computes."""
        return False

    def lighter(self) -> Iterable[Mapping[str, object]]:
        """Return changes of settings (key → value) that would each save accelerator memory, the one that costs least first."""
        return ()

    def shards(self, ranks: int) -> int:
        """Return the number of ranks over which each parameter is divided.

        Raises:
            PlanError: the engine does not support this number of ranks.
        """
        return 1


@attrs.frozen(kw_only=True)
class TrainingSection:
    """The training of a model, whatever the engine."""

    optim: OptimSection = _optim()
    """Optimizer and schedule."""
    max_tokens_per_micro_batch: int = attrs.field(default=16384, validator=attrs.validators.ge(1))
    """Token budget of one forward and backward pass; the result does not depend on it."""
    grad_clip: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """Maximum gradient norm; 0 clips nothing."""
    offload: bool = False
    """Keep parameters and optimizer off the accelerator while the role does not compute."""


@attrs.frozen(kw_only=True)
class ActorSection(TrainingSection):
    """The policy that is trained."""

    engine: EngineSection = plugin_field("engine", "fsdp2")
    """The training engine."""
    objective: PluginSection | None = plugin_field("objective", None)
    """The objective to minimise; by default the policy loss of `algorithm` with KL penalty and entropy bonus."""
    mini_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Number of prompts for each optimizer step; None means the whole rollout batch."""
    epochs: int = attrs.field(default=1, validator=COUNT)
    """Passes over each rollout batch."""
    shuffle: bool = False
    """Draw mini-batches in a new order of the prompts in every pass over a rollout batch."""
    max_kl: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """KL of a mini-batch to the old policy (nats a token) above which a step's remaining updates are left out."""


@attrs.frozen(kw_only=True)
class CriticSection(TrainingSection):
    """The value model; it exists only if something requires `values`, as the advantage estimator `gae` does."""

    optim: OptimSection = _optim(lr=1e-5)
    """Optimizer and schedule of the critic."""
    engine: EngineSection | None = plugin_field("engine", None)
    """The training engine; by default the actor's."""
    objective: PluginSection | None = plugin_field("objective", None)
    """The objective to minimise; by default the value loss, with `value_clip` and `loss_aggregation`."""
    path: str | None = None
    """Starting checkpoint; by default the actor's. The value head starts at 0 if the checkpoint has none."""
    override_config: Mapping[str, Any] | None = _override_config()
    """As `model.override_config`, which is the default if `path` is absent or equals `model.path`."""
    mini_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Number of prompts for each optimizer step; by default the actor's."""
    epochs: int | None = attrs.field(default=None, validator=attrs.validators.optional(COUNT))
    """Passes over each rollout batch; by default the actor's."""
    value_clip: float | None = attrs.field(default=0.5, validator=ABOVE_ZERO)
    """Maximum change of a value from its value before the step's updates (PPO's value clipping); None for no limit."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """The aggregation of token losses into one number."""
    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Number of steps at the start of the run in which the critic alone is trained."""


@attrs.frozen(kw_only=True)
class FollowSection:
    """Rule by which an untrained model follows the actor: w ← decay · w + (1 − decay) · w_actor at the end of a step."""

    every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Steps of the run between two updates."""
    decay: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Share of the model's own weights that is kept at each update; 0 copies the actor's weights. The factors A and B of an
    adapter are averaged separately."""

    def __str__(self) -> str:
        when = "every step" if self.every == 1 else f"every {self.every} steps"
        if not self.decay:
            return f"is set to the actor {when}"
        return f"averages the actor {when} (decay {self.decay:g})"


@attrs.frozen(kw_only=True)
class RoleSection(TrainingSection):
    """A further model of the run.

    It is trained if it has an `objective`, follows the actor if it has an `update`, and is frozen otherwise.
    """

    engine: EngineSection | None = plugin_field("engine", None)
    """The engine that scores with the model and trains it; by default the actor's."""
    objective: PluginSection | None = plugin_field("objective", None)
    """The objective to minimise in every step; without `objective` and `update`, the model is frozen and has no adapter."""
    update: FollowSection | None = None
    """Rule by which a model without an objective follows the actor; by default its weights never change."""
    path: str | None = None
    """Checkpoint of the model; by default the actor's starting weights."""
    override_config: Mapping[str, Any] | None = _override_config()
    """As `model.override_config`, which is the default if `path` is absent or equals `model.path`."""
    head: Literal["lm", "value"] = "lm"
    """Last layer of the model: a language model's head, or one value a token."""
    mini_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Number of prompts for each optimizer step; None means the whole batch of a step."""
    epochs: int = attrs.field(default=1, validator=COUNT)
    """Passes over the batch of each step."""


@attrs.frozen(kw_only=True)
class RefSection:
    """The reference policy, which is not trained; it exists only if something requires `ref_log_probs`."""

    update: FollowSection | None = None
    """Rule by which the reference follows the actor (TR-DPO, arXiv 2404.09656); by default its weights never change. If the
    actor has an adapter, a reference that follows is a separate model, not the actor with its adapter disabled."""
    engine: EngineSection | None = plugin_field("engine", None)
    """The engine that scores with the reference; by default the actor's."""
    path: str | None = None
    """Checkpoint of the model; by default the actor's starting weights."""
    override_config: Mapping[str, Any] | None = _override_config()
    """As `model.override_config`, which is the default if `path` is absent or equals `model.path`."""
    max_tokens_per_micro_batch: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Token budget of one pass; by default the actor's."""
    offload: bool = False
    """Keep the reference off the accelerator while it does not compute."""
