"""The sections of a config: frozen attrs classes, each field with the docstring that `--help` and `config explain` show.

Plugins extend the base of their kind. Nothing here imports torch.
"""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from dovetail.config.algorithm import AlgorithmSection
from dovetail.config.fields import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    COLLECTION,
    ONE_OR_MANY,
    PLUGIN_DEFAULT,
    PLUGIN_KIND,
    VERBATIM,
    PluginSection,
    PresetSection,
    plugin_field,
)
from dovetail.config.placement import RuntimeSection
from dovetail.config.profile import ProfileSection
from dovetail.config.rollout import ProbeSection, RolloutSection, ValidationSamplingSection

__all__ = [
    "COLLECTION",
    "ONE_OR_MANY",
    "PLUGIN_DEFAULT",
    "PLUGIN_KIND",
    "VERBATIM",
    "ActorSection",
    "AlgorithmSection",
    "CriticSection",
    "DataSection",
    "EngineSection",
    "ModelSection",
    "OptimSection",
    "PluginSection",
    "PreflightSection",
    "PresetSection",
    "ProbeSection",
    "ProfileSection",
    "RefSection",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "RuntimeSection",
    "TrainerSection",
    "TrainingSection",
    "ValidationSamplingSection",
    "plugin_field",
]


@attrs.frozen(kw_only=True)
class ModelSection:
    """The policy's model and tokenizer."""

    path: str
    """A directory in Hugging Face format, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Compute dtype of forward passes and generation; master weights are float32."""
    tokenizer_path: str | None = None
    """Tokenizer directory or hub id; the model's own where absent."""
    chat_template: str | None = attrs.field(default=None, metadata={VERBATIM: True})
    """A Jinja chat template, or the path of a file that holds one; replaces the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that the model repository ships."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    attn_implementation: str = "sdpa"
    """transformers' attention implementation."""


@attrs.frozen(kw_only=True)
class DataSection:
    """Where prompts come from and how many a step takes."""

    train_files: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Parquet or JSONL files with training rows: a list, or one file's path as a bare string."""
    val_files: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Parquet or JSONL files with held-out rows: a list, or one file's path as a bare string."""
    source: PluginSection = plugin_field("dataset", "files")
    """What reads the files."""
    sampler: PluginSection = plugin_field("sampler", "shuffled")
    """The order of the prompts."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: messages, or a plain string."""
    image_key: str = "images"
    """Column that holds the prompt's images: paths, bytes, or mappings with `bytes` or `path`."""
    media_dir: str | None = None
    """Directory in which images that have no file of their own are kept, by their content. All processes of a run read
    it. None: `media` in `output_dir`."""
    train_batch_size: int = attrs.field(default=128, validator=attrs.validators.ge(1))
    """Prompts a step; samples a step are this times rollout.n."""
    val_batch_size: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Prompts generated at once in validation; None means all."""
    max_prompt_length: int = attrs.field(default=1024, validator=attrs.validators.ge(1))
    """Longest prompt in tokens."""
    max_response_length: int = attrs.field(default=1024, validator=attrs.validators.ge(1))
    """Most tokens generated for a response."""
    overlong_prompts: Literal["filter", "error"] = "filter"
    """What happens to longer prompts: filtered and counted, or refused."""
    plain_prompts: Literal["user_message", "raw"] = "user_message"
    """How a plain-string prompt reaches the model: as a user message, or as it stands."""


@attrs.frozen(kw_only=True)
class OptimSection:
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or plain gradient descent without momentum."""
    lr: float = attrs.field(default=1e-6, validator=attrs.validators.ge(0))
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    eps: float = attrs.field(default=1e-8, validator=attrs.validators.gt(0))
    """AdamW's denominator floor."""
    weight_decay: float = attrs.field(default=0.01, validator=attrs.validators.ge(0))
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up; linear and cosine fall to `min_lr_ratio` at the last step."""
    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """Final learning rate as a share of the peak."""


@attrs.frozen(kw_only=True)
class EngineSection(PluginSection):
    """Base of every training engine's config."""

    def mesh_axes(self) -> Mapping[str, int]:
        """Sizes of the mesh's axes besides dp, in rank order; dp takes what they leave of the ranks."""
        return {}

    def weight_kind(self) -> Literal["full", "adapter"]:
        """What the engine sends to the rollout: all weights, or an adapter, which rollouts with the capability `lora`
        can apply.
        """
        return "full"

    def adapter_rank(self) -> int | None:
        """The rank of the adapter where `weight_kind` is "adapter"; None where it is not known."""
        return None

    def shards(self, ranks: int) -> int:
        """Over how many of a group's ranks each parameter is divided.

        Raises:
            PlanError: the engine can't be spread over so many ranks.
        """
        return 1


@attrs.frozen(kw_only=True)
class TrainingSection:
    """How a model is trained, whichever engine does it."""

    optim: OptimSection = attrs.field(factory=OptimSection)
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
    """What trains it."""
    mini_batch_size: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Prompts an optimizer step; None means the whole rollout batch."""
    epochs: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Passes over each rollout batch."""
    shuffle: bool = False
    """Cut mini-batches from another order of the prompts in every pass over a rollout batch."""
    max_kl: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Leave out a step's remaining updates once a mini-batch's KL to the old policy (nats a token) is above this."""


def _critic_optim() -> OptimSection:
    return OptimSection(lr=1e-5)


@attrs.frozen(kw_only=True)
class CriticSection(TrainingSection):
    """The value model; it exists only where something requires `values`, as the advantage estimator `gae` does."""

    optim: OptimSection = attrs.field(factory=_critic_optim)
    """Optimizer and schedule, of its own."""
    engine: EngineSection | None = plugin_field("engine", None)
    """What trains it; the actor's engine where absent."""
    path: str | None = None
    """Its starting checkpoint; the actor's where absent. The value head starts at 0 where there is none in it."""
    mini_batch_size: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Prompts an optimizer step; the actor's where absent."""
    epochs: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Passes over each rollout batch; the actor's where absent."""
    value_clip: float | None = attrs.field(default=0.5, validator=ABOVE_ZERO)
    """How far a value may move from the one before the step's updates (PPO's value clipping); None for any."""
    loss_aggregation: PluginSection = plugin_field("loss_aggregation", "token_mean")
    """How the tokens' value losses become one number."""
    warmup_steps: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """First steps of the run in which the critic alone is trained."""


@attrs.frozen(kw_only=True)
class RefSection:
    """The frozen reference policy; it exists only where something requires `ref_log_probs`."""

    engine: EngineSection | None = plugin_field("engine", None)
    """What scores with it; the actor's engine where absent."""
    path: str | None = None
    """Its checkpoint; the actor's starting weights where absent."""
    max_tokens_per_micro_batch: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Token budget of one pass; the actor's where absent."""
    offload: bool = False
    """Keep it off the accelerator while it does not compute."""


@attrs.frozen(kw_only=True)
class RewardSection:
    """How responses are scored, and what failures mean."""

    manager: PluginSection = plugin_field("reward_manager", "naive")
    """What runs the reward functions."""
    function: PluginSection | None = plugin_field("reward_function", None)
    """One function for every row: a name, or a file with `compute_score`."""
    functions: dict[str, PluginSection] = plugin_field("reward_function", None, collection="dict")
    """A function for each `data_source`."""
    timeout: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """Seconds after which a sample counts as failed."""
    retries: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Further tries of a retryable failure."""
    concurrency: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """Units scored at once; managers that queue for themselves, such as `parallel`, have limits of their own."""
    max_failure_share: float = attrs.field(
        default=0.5, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """The run stops when a larger share of a step's samples could not be scored."""
    on_failure: Literal["drop", "refill"] = "drop"
    """What becomes of a group of which samples could not be scored: drop trains on the others; refill draws new samples to the same prompt in their place."""
    refill_rounds: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Further rounds of generation in a step, at most, where on_failure is refill; what fails in the last of them is left out."""


@attrs.frozen(kw_only=True)
class TrainerSection(PluginSection):
    """Base of every trainer's config."""

    total_epochs: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Passes over the training prompts: they make prompts · epochs / data.train_batch_size steps. Prompts that replace
    groups which a filter left out come on top, from the passes after."""
    total_steps: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Stop after this many steps, whatever the epochs."""
    save_every: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Checkpoint every so many steps; 0 means only at the end."""
    save_last: bool = True
    """Checkpoint the last step. A run that is stopped or fails saves what it has finished all the same."""
    keep_checkpoints: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Checkpoints to keep, newest first; None means all."""
    validate_every: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Validate every so many steps; 0 means only before and after."""
    validate_before: bool = True
    """Validate before the first step."""
    validate_after: bool = True
    """Validate after the last step."""
    samples_per_step: int = attrs.field(default=16, validator=attrs.validators.ge(-1))
    """Samples of each step written for reading; -1 means all."""
    validation_samples: int = attrs.field(default=-1, validator=attrs.validators.ge(-1))
    """Samples of each validation written for reading; -1 means all."""
    best_metric: str | None = None
    """A validation metric, such as `val/mean@1`; the checkpoint of the step where it was best is kept. None for none."""
    best_is: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest."""
    deterministic: bool = False
    """Use deterministic kernels where they cost speed."""


@attrs.frozen(kw_only=True)
class PreflightSection:
    """The rules that look for silent misconfiguration before a run."""

    ignore: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Ids of rules to leave out, such as `kl_twice`: a list, or one as a bare string."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """A whole config."""

    seed: int = 1
    """Every random stream derives from it."""
    project: str = "dovetail"
    """First folder below `output_dir`."""
    experiment: str = "default"
    """Second folder below `output_dir`."""
    output_dir: str = "runs"
    """Where run directories go."""
    model: ModelSection
    """The policy."""
    data: DataSection = attrs.field(factory=DataSection)
    """Prompts."""
    rollout: RolloutSection = plugin_field("rollout", "hf")
    """Generation."""
    actor: ActorSection = attrs.field(factory=ActorSection)
    """Training."""
    critic: CriticSection = attrs.field(factory=CriticSection)
    """The value model."""
    ref: RefSection = attrs.field(factory=RefSection)
    """The reference policy."""
    algorithm: AlgorithmSection = attrs.field(factory=AlgorithmSection)
    """Estimator, loss, KL."""
    reward: RewardSection = attrs.field(factory=RewardSection)
    """Scoring."""
    trainer: TrainerSection = plugin_field("trainer", "on_policy")
    """The loop."""
    runtime: RuntimeSection = plugin_field("runtime", "inline")
    """Where workers live."""
    tracking: tuple[PluginSection, ...] = plugin_field(
        "tracker", "console jsonl", collection="list"
    )
    """Where metrics go."""
    preflight: PreflightSection = attrs.field(factory=PreflightSection)
    """What is checked before a run."""
    profile: ProfileSection = attrs.field(factory=ProfileSection)
    """What is profiled."""
