"""RunConfig, the complete config, and its sections on model, data, reward, trainer and preflight. This module does not import torch.

`--help` and `config explain` show the docstring of each field. Trainer plugins extend TrainerSection.
"""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import attrs

from dovetail.sections.algorithm import AlgorithmSection
from dovetail.sections.fields import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    COUNT,
    JSON_VALUES,
    ONE_OR_MANY,
    TOKENS,
    VERBATIM,
    PluginSection,
    plugin_field,
)
from dovetail.sections.placement import RuntimeSection
from dovetail.sections.profile import ProfileSection
from dovetail.sections.rollout import RolloutSection
from dovetail.sections.training import (
    ActorSection,
    CriticSection,
    RefSection,
    RoleSection,
)


@attrs.frozen(kw_only=True)
class ModelSection:
    """The policy's model and tokenizer."""

    path: str
    """A directory in Hugging Face format, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of forward passes and generation; master weights are float32. float16 would need loss scaling: small
    gradients vanish in it."""
    tokenizer_path: str | None = None
    """Tokenizer directory or hub id; by default the model's own."""
    chat_template: str | None = attrs.field(default=None, metadata={VERBATIM: True})
    """A Jinja chat template, or the path of a file that holds one; replaces the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that the model repository ships."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    attn_implementation: str = "sdpa"
    """transformers' attention implementation."""
    override_config: Mapping[str, Any] = attrs.field(factory=dict, validator=JSON_VALUES)
    """Values that replace those of the model's config.json, such as `{max_position_embeddings: 32768}`; values of a nested
    config, such as `text_config`, are given below its name. The values apply to training, rollout, planning and exported models. Roles
    with a `path` of their own have their own overrides."""


@attrs.frozen(kw_only=True)
class MixtureSection:
    """One dataset of `data.mixture`."""

    files: tuple[str, ...] = attrs.field(metadata={ONE_OR_MANY: True})
    """Parquet or JSONL files with training rows: a list, or one file's path as a bare string."""
    weight: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Weight of the dataset: its share of an epoch is the weight divided by the sum of all weights. Either every dataset has a weight, or
    none has (None). Without weights, each dataset gives as many prompts or examples as it has rows."""
    prompt_key: str | None = None
    """Column that holds the prompt; by default `data.prompt_key`."""


def _whole_mixture(
    _section: object, _attribute: object, mixture: Mapping[str, MixtureSection]
) -> None:
    for name in mixture:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise ValueError(
                f"mixture.{name}: expected a name of letters, digits and the characters '_', '-' and '.'; it becomes part of metric names"
            )
    given = [name for name, each in mixture.items() if each.weight is not None]
    if given and len(given) < len(mixture):
        without = next(name for name in mixture if name not in given)
        raise ValueError(
            f"mixture.{without} has no weight, but mixture.{given[0]} has one; give every dataset a weight, or none"
        )


@attrs.frozen(kw_only=True)
class DataSection:
    """The prompts or examples, and how many a step takes."""

    train_files: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Parquet or JSONL files with training rows: a list, or one file's path as a bare string."""
    mixture: dict[str, MixtureSection] = attrs.field(factory=dict, validator=_whole_mixture)
    """Several datasets by name with weights, in place of `train_files`: `{math: {files: math.parquet, weight: 3}, chat: {files: chat.jsonl,
    weight: 1}}`. An epoch has as many prompts as all datasets have rows together; weights may repeat a dataset or use only a part of it."""
    streaming: Literal["auto"] | bool = "auto"
    """For trainers on examples of a dataset: read training rows when they are needed, and tokenise ahead. Overlong rows are then left out,
    and faulty rows found, when they are read. auto: stream if the rows have more than 67 million characters, which take a process about a
    minute. In either case tokens are kept on disk, where the next start reads them."""
    processes: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Processes that tokenise examples, if the cache lacks more than 8,192 examples; None: one for each core, at most 8."""
    cache_dir: str | None = None
    """Directory of the cache of tokens and of decompressed files, which may be deleted at any time. None: `$DOVETAIL_CACHE`, or
    `~/.cache/dovetail`."""
    max_bad_rows: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Maximum number of faulty rows to leave out; `bad_rows.jsonl` in the run directory names them."""
    shuffle_window: int = attrs.field(default=16384, validator=COUNT)
    """Number of streamed rows that are shuffled together and tokenised ahead; the order of the files' row groups is shuffled first."""
    val_files: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Parquet or JSONL files with held-out rows: a list, or one file's path as a bare string."""
    source: PluginSection = plugin_field("dataset", "files")
    """The plugin that reads the files."""
    sampler: PluginSection = plugin_field("sampler", "shuffled")
    """The order of the prompts."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: messages, or a plain string."""
    messages_key: str = "messages"
    """Column that holds an example's conversation; without this column, an example is made of a prompt and a response."""
    image_key: str = "images"
    """Column that holds the prompt's images: paths, bytes, or mappings with `bytes` or `path`."""
    media_dir: str | None = None
    """Directory for copies of images that have no file of their own; all processes of a run read it. None: `media` in `output_dir`."""
    train_batch_size: int = attrs.field(default=128, validator=COUNT)
    """Prompts a step, each with rollout.n samples; or examples a step, for trainers on examples of a dataset."""
    val_batch_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(COUNT)
    )
    """Prompts generated at once in validation; None means all."""
    max_prompt_length: int = attrs.field(default=1024, validator=TOKENS)
    """Maximum tokens of a prompt. Unless `max_length` is set, also of the part of an example before its first trained token."""
    max_response_length: int = attrs.field(default=1024, validator=TOKENS)
    """Maximum tokens generated for a response. Unless `max_length` is set, also of an example from its first trained token on."""
    max_length: int | None = attrs.field(default=None, validator=attrs.validators.optional(TOKENS))
    """Maximum tokens of an example, prompt and response together, in place of `max_prompt_length` and `max_response_length`."""
    overlong_prompts: Literal[
        "filter", "error", "truncate_left", "truncate_right", "truncate_middle"
    ] = "filter"
    """What happens to prompts and examples beyond the length limits: they are filtered and counted, refused, or cut at the start, end or
    middle. Prompts are cut to `max_prompt_length`, conversations to `max_length`. Without `max_length`, only `truncate_right` cuts
    conversations, after the last trained token within `max_response_length`. Prompts whose images would be cut, and conversations that
    would lose an image or all trained tokens, are filtered instead."""
    plain_prompts: Literal["user_message", "raw"] = "user_message"
    """How a plain-string prompt reaches the model: as a user message, or unchanged. An example's response follows as the assistant's
    message, or unchanged."""
    continue_answer: bool = False
    """Whether the policy continues an answer that an assistant's message at the end of the prompt begins; otherwise such prompts are faulty
    rows. For trainers that generate."""
    control_tokens: Literal["text", "allow"] = "text"
    """Encoding of control tokens, such as `<|im_end|>`, that are spelt out in messages, tools' results and observations: as text, or as the
    tokens (allow). Raw texts always keep the tokens."""
    trained_turns: Literal["all", "last"] = "all"
    """The assistant's turns of a conversation that are trained on; turns with `weight: 0` never are."""
    chat_template_args: Mapping[str, Any] = attrs.field(factory=dict, validator=JSON_VALUES)
    """Arguments of the chat template, such as `{enable_thinking: false}`: JSON values by the names that the template reads. Exported models
    keep the arguments as defaults of their chat template."""

    @property
    def longest(self) -> tuple[int, str]:
        """Length of the longest possible sample in tokens, and a text with the keys that limit it and their values."""
        if self.max_length is not None:
            return self.max_length, f"data.max_length = {self.max_length}"
        prompt, response = self.max_prompt_length, self.max_response_length
        keys = f"data.max_prompt_length + data.max_response_length = {prompt} + {response}"
        return prompt + response, f"{keys} = {prompt + response}"

    @property
    def training_files(self) -> tuple[str, ...]:
        """All files with training rows, including those of a mixture."""
        return self.train_files + tuple(f for each in self.mixture.values() for f in each.files)


@attrs.frozen(kw_only=True)
class RewardSection:
    """The scoring of responses, and the treatment of failures."""

    manager: PluginSection = plugin_field("reward_manager", "naive")
    """The plugin that runs the reward functions."""
    function: PluginSection | None = plugin_field("reward_function", None)
    """One function for every row: a name, or a file with `compute_score`."""
    functions: dict[str, PluginSection] = plugin_field("reward_function", None, collection="dict")
    """Functions by the `data_source` of the rows that they score."""
    timeout: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """Seconds of scoring after which a sample counts as failed."""
    retries: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Number of further attempts to score a sample after a retryable failure."""
    concurrency: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """Number of samples, or groups, that are scored at once; managers with their own queue, such as `parallel`, have their own limits."""
    max_failure_share: float = attrs.field(
        default=0.5, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    """Maximum share of a step's samples that may fail to be scored; beyond it the run stops."""
    on_failure: Literal["drop", "refill"] = "drop"
    """Treatment of a group with samples that could not be scored: drop trains on the scored samples; refill replaces failed samples by new
    samples for the same prompt."""
    refill_rounds: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    """Maximum further rounds of generation in a step if on_failure is refill; samples that fail in the last round are left out."""


def _has_best(section: TrainerSection, _attribute: attrs.Attribute[str], value: str) -> None:
    if value == "best" and section.best_metric is None:
        raise ValueError(
            "export = best needs a metric: set trainer.best_metric, such as val/mean@1"
        )


@attrs.frozen(kw_only=True)
class TrainerSection(PluginSection):
    """Base of every trainer's config."""

    total_epochs: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Passes over the training prompts, which make prompts · epochs / data.train_batch_size steps. Prompts that replace filtered groups are
    additional, and come from later passes."""
    total_steps: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Stop after this many steps, whatever `total_epochs` is."""
    save_every: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Steps between checkpoints; 0 saves only at the end."""
    save_last: bool = True
    """Save a checkpoint of the last step. A stopped or failed run saves its finished steps in any case."""
    async_save: bool = True
    """Write checkpoints while training continues, from a copy in host memory: 12 bytes for each trained parameter, spread over the ranks
    (84 GB for full fine-tuning of 7B parameters). If off, training waits until the checkpoint is on the disk."""
    export: Literal["last", "best", "none"] = attrs.field(default="last", validator=_has_best)
    """Model that a completed run writes to `final/` in the run directory, in Hugging Face format with the tokenizer: the actor after the
    last step, the actor of the best checkpoint (by `best_metric`), or none."""
    keep_checkpoints: int | None = attrs.field(
        default=cast("int | None", 3), validator=AT_LEAST_ONE
    )
    """Number of newest checkpoints to keep, besides the best one and those of `keep_every`; None keeps all."""
    keep_every: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Also keep every checkpoint whose step is divisible by this number, such as 500; 0 keeps only the newest and the best ones."""
    copy_to: str | None = None
    """An fsspec address, such as `s3://bucket/runs`, to which kept checkpoints are copied in the background. `train` continues from the
    copies if the run directory has no checkpoint."""
    max_failed_saves: int = attrs.field(default=3, validator=COUNT)
    """Number of consecutive saves that fail because the disk is full, after which the run fails; earlier checkpoints remain. If the save
    of the last step finds the disk full, the run fails at once."""
    validate_every: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Steps between validations; 0 validates only before and after training."""
    validate_before: bool = True
    """Validate before the first step."""
    validate_after: bool = True
    """Validate after the last step."""
    resume: str = "auto"
    """What `train` does if the run directory already holds a run. auto: continue from the newest undamaged checkpoint, or from the start if
    there is none; a finished run stays as it is. never: refuse. The path of a checkpoint, or of a run directory (its latest
    checkpoint): begin a new run from this checkpoint; once begun, continue as with auto."""
    run_restarts: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Maximum number of times that `dovetail train` and `resume` restart the run from its last checkpoint. They restart it if the run's
    process was killed, or failed because of lost processes, machines or engines, a full disk or the network; not after other errors, nor
    twice without a new step."""
    samples_per_step: int = attrs.field(default=16, validator=attrs.validators.ge(-1))
    """Number of each step's samples that are written to `samples/`, for people to read; -1 means all."""
    validation_samples: int = attrs.field(default=-1, validator=attrs.validators.ge(-1))
    """Number of each validation's samples that are written to files, for people to read; -1 means all."""
    kept_samples_bytes: int = attrs.field(default=64 << 20, validator=attrs.validators.ge(0))
    """Maximum bytes of all files `samples/kept_N.jsonl` of a run. The file of step N has the best, worst and longest sample, a failed one,
    and the one with the largest advantage, with advantages and log-probabilities; if room is left, also the other responses to these
    prompts. Beyond the limit, the files of every second step are removed; 0 writes none."""
    max_log_bytes: int = attrs.field(default=64 << 20, validator=attrs.validators.ge(0))
    """Maximum bytes of each file below `logs/`, to which workers and engines print. After each step, the last `max_log_bytes` of a longer
    file are moved to FILE.1, replacing it; 0 means no limit."""
    best_metric: str | None = None
    """A validation metric, such as `val/mean@1`; the checkpoint with its best value is kept. None for no metric."""
    best_is: Literal["auto", "max", "min"] = "auto"
    """Whether the largest or the smallest value is the best; auto: the smallest of a loss or perplexity, else the largest."""
    deterministic: bool = False
    """Use deterministic kernels, even if they are slower."""

    def settings(self) -> Mapping[str, Any]:
        """Return the trainer's defaults for other sections, as nested mappings; a key that a config layer gives overrides its default."""
        return {}


@attrs.frozen(kw_only=True)
class PreflightSection:
    """The rules that look for silent misconfiguration before a run."""

    ignore: tuple[str, ...] = attrs.field(default=(), metadata={ONE_OR_MANY: True})
    """Ids of rules to leave out, such as `kl_twice`: a list, or one id as a bare string."""


_OWN_SECTIONS = ("actor", "ref", "critic")
"""Roles whose sections are top-level fields of the config; other roles are in `roles`."""
_METRICS_OF_RUNS = ("data", "perf", "reward", "rollout", "time", "val")
"""Prefixes of metrics that are not a role's; a role's metrics begin with its name."""


def _role_names(
    _section: object, _attribute: attrs.Attribute[Any], roles: Mapping[str, Any]
) -> None:
    for name in roles:
        if name in _OWN_SECTIONS:
            raise ValueError(
                f"roles.{name}: this role has its own section at the top level of the config; move the settings to {name}"
            )
        if name in _METRICS_OF_RUNS or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise ValueError(
                f"roles.{name}: expected a name of lower-case letters, digits and '_'; {', '.join(_METRICS_OF_RUNS)} are reserved, "
                "since the names of other metrics begin with them"
            )


@attrs.frozen(kw_only=True)
class RunConfig:
    """The complete config of a run."""

    seed: int = attrs.field(
        default=1, validator=[attrs.validators.ge(0), attrs.validators.lt(2**63)]
    )
    """Seed of every random stream, and of torch's CPU generator, from which rewards and plugins draw. Concurrent reward calls in one
    process draw in no fixed order: set `reward.concurrency` to 1, or use `parallel`, which seeds each call."""
    project: str = "dovetail"
    """Folder below `output_dir` that contains the run directories of a project."""
    experiment: str = "default"
    """Name of the run directory, in the folder of the project."""
    output_dir: str = "runs"
    """Directory that contains the folders of projects, and in them the run directories."""
    model: ModelSection
    """The policy's model and tokenizer."""
    data: DataSection = attrs.field(factory=DataSection)
    """The prompts or examples, and how many a step takes."""
    source: PluginSection | None = plugin_field("source", None)
    """The source of samples; by default the trainer's: `rollouts`, or `examples` for a trainer on a dataset's examples."""
    rollout: RolloutSection = plugin_field("rollout", "hf")
    """The rollout engine and how it samples."""
    actor: ActorSection = attrs.field(factory=ActorSection)
    """The training of the policy."""
    critic: CriticSection = attrs.field(factory=CriticSection)
    """The value model."""
    ref: RefSection = attrs.field(factory=RefSection)
    """The reference policy."""
    roles: dict[str, RoleSection] = attrs.field(factory=dict, validator=_role_names)
    """Further models by the names of their roles, such as `{teacher: {path: DIRECTORY}}`, for the stages that compute with them."""
    algorithm: AlgorithmSection = attrs.field(factory=AlgorithmSection)
    """The algorithm: estimator, loss, KL and others."""
    reward: RewardSection = attrs.field(factory=RewardSection)
    """The scoring of responses."""
    trainer: TrainerSection = plugin_field("trainer", "on_policy")
    """The training loop, with checkpoints and validation."""
    runtime: RuntimeSection = plugin_field("runtime", "inline")
    """The runtime, which starts the workers."""
    tracking: tuple[PluginSection, ...] = plugin_field(
        "tracker", "console jsonl", collection="list"
    )
    """The trackers, which receive the metrics. Default trackers that are not installed are left out."""
    preflight: PreflightSection = attrs.field(factory=PreflightSection)
    """The checks before a run."""
    profile: ProfileSection = attrs.field(factory=ProfileSection)
    """The profiling of training workers."""

    @property
    def role_sections(
        self,
    ) -> Mapping[str, ActorSection | CriticSection | RefSection | RoleSection]:
        """The section of every role except the rollout, by the role's name: actor, ref, critic and all of `roles`, used or not."""
        return {name: getattr(self, name) for name in _OWN_SECTIONS} | self.roles

    def plugin_sections(self) -> Iterator[tuple[str, str, PluginSection | None]]:
        """Yield key path, kind and section of the plugins that every run resolves, such as engines, optimizers, stages and trackers.

        Not among them are the trainer, the source, and plugins that the source or the stage set selects (`selects`), such as the rollout.
        """
        yield "actor.engine", "engine", self.actor.engine
        yield "critic.engine", "engine", self.critic.engine
        yield "ref.engine", "engine", self.ref.engine
        trained = {"actor": self.actor, "critic": self.critic}
        trained |= {f"roles.{name}": role for name, role in self.roles.items()}
        for key, section in trained.items():
            yield f"{key}.optim", "optimizer", section.optim
            yield f"{key}.optim.schedule", "schedule", section.optim.schedule
        for name, role in self.roles.items():
            yield f"roles.{name}.engine", "engine", role.engine
            yield f"roles.{name}.objective", "objective", role.objective
        yield "algorithm.stage_set", "stage_set", self.algorithm.stage_set
        for i, stage in enumerate(self.algorithm.stages):
            yield f"algorithm.stages[{i}]", "stage", stage
        yield "runtime", "runtime", self.runtime
        yield "data.source", "dataset", self.data.source
        yield "data.sampler", "sampler", self.data.sampler
        for i, tracker in enumerate(self.tracking):
            yield f"tracking[{i}]", "tracker", tracker

    def model_section(self, role: str) -> ModelSection:
        """Return `model` with a role's own path and overrides, if it has any; a role with another path does not inherit overrides."""
        section = self.role_sections[role]
        path = getattr(section, "path", None) or self.model.path
        inherited = self.model.override_config if path == self.model.path else {}
        own = getattr(section, "override_config", None)
        return attrs.evolve(
            self.model, path=path, override_config=inherited if own is None else own
        )

    def role_key(self, role: str) -> str:
        """Return the key path of a role's section."""
        return f"roles.{role}" if role in self.roles else role
