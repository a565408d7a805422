"""Rules: what the functions that translate a job share, and the tables of keys that are translated one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from dovetail_migrate.draft import Draft
from dovetail_migrate.verl.job import Job

_SHORT = ("actor", "ref", "rollout", "model")


@attrs.frozen(kw_only=True)
class Sizes:
    """The counts of a step, as verl means them."""

    prompts: int
    n: int
    mini_batch: int
    epochs: int
    longest: int
    """Tokens of the longest prompt and response together."""
    gpus: int

    @property
    def updates(self) -> int:
        """Optimizer steps a step."""
        return math.ceil(self.prompts / self.mini_batch) * self.epochs


@attrs.frozen(kw_only=True)
class Rules:
    """A job, the draft of its config, and the counts.

    Keys of verl's are written without `actor_rollout_ref.`; `=` before one takes it as it stands.
    """

    job: Job
    draft: Draft
    sizes: Sizes
    rows: int | None = None
    """Rows of the training files, where they are known."""

    def full(self, key: str) -> str:
        """Return verl's whole key."""
        if key.startswith("="):
            return key[1:]
        short = key.partition(".")[0] in _SHORT and not self.job.finetunes
        return f"actor_rollout_ref.{key}" if short else key

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of verl's; the default where it is absent or null."""
        return self.job.get(self.full(key), default)

    def given(self, key: str) -> bool:
        """Return whether the key, or one below it, was given."""
        return self.job.is_given(self.full(key))

    def put(self, ours: str, value: Any, *theirs: str, why: str = "") -> None:
        """Set a key of ours, as `Draft.put` does."""
        self.draft.put(ours, value, *map(self.full, theirs), why=why)

    def same(self, theirs: str, ours: str, cast: Callable[[Any], Any] = str) -> None:
        """Give our key the value of verl's, unless that is null."""
        if (value := self.get(theirs)) is not None and (made := cast(value)) is not None:
            self.put(ours, made, theirs)

    def idle(self, why: str, *theirs: str) -> None:
        """Note keys that need nothing here."""
        self.draft.idle(why, *map(self.full, theirs))

    def change(self, why: str, *theirs: str) -> None:
        """Note keys that are met in another way than by a key."""
        self.draft.change(why, *map(self.full, theirs))

    def refuse(self, why: str, *theirs: str) -> None:
        """Note keys that nothing here stands for."""
        self.draft.refuse(why, *map(self.full, theirs))

    @property
    def steps(self) -> int | None:
        """Steps of the run, where they are known."""
        if (steps := self.get("trainer.total_training_steps")) is not None:
            return int(steps)
        if self.rows is None:
            return None
        return self.rows // self.sizes.prompts * int(self.get("trainer.total_epochs", 1))

    @property
    def trains_critic(self) -> bool:
        """Whether verl trains a critic."""
        return bool(self.get("critic.enable", self.get("algorithm.adv_estimator") == "gae"))


def on(value: Any) -> bool | None:
    """Return true for what is on, and nothing for what is off."""
    return True if value else None


def as_list(value: Any) -> Any:
    """Return one file as text, several as a list; scripts also quote lists."""
    from dovetail_migrate.verl.overrides import read_value

    listed = read_value(value) if isinstance(value, str) and value.startswith("[") else value
    texts = [str(item) for item in listed] if isinstance(listed, (list, tuple)) else [str(listed)]
    return texts[0] if len(texts) == 1 else texts


DIRECT: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("data.train_files", "data.train_files", as_list),
    ("data.val_files", "data.val_files", as_list),
    ("data.max_prompt_length", "data.max_prompt_length", int),
    ("data.max_response_length", "data.max_response_length", int),
    ("data.prompt_key", "data.prompt_key", str),
    ("data.image_key", "data.image_key", str),
    ("data.seed", "seed", int),
    ("data.tokenizer", "model.tokenizer_path", str),
    ("data.val_batch_size", "data.val_batch_size", lambda size: int(size) or None),
    ("model.path", "model.path", str),
    ("model.tokenizer_path", "model.tokenizer_path", str),
    ("model.custom_chat_template", "model.chat_template", str),
    ("model.trust_remote_code", "model.trust_remote_code", on),
    ("data.trust_remote_code", "model.trust_remote_code", on),
    ("actor.ppo_epochs", "actor.epochs", int),
    ("actor.shuffle", "actor.shuffle", bool),
    ("actor.freeze_vision_tower", "actor.engine.freeze_vision", on),
    ("actor.entropy_coeff", "algorithm.entropy.coef", float),
    ("rollout.n", "rollout.n", int),
    ("rollout.temperature", "rollout.temperature", float),
    ("rollout.top_p", "rollout.top_p", float),
    ("rollout.top_k", "rollout.top_k", int),
    ("rollout.ignore_eos", "rollout.ignore_eos", bool),
    ("rollout.val_kwargs.n", "rollout.validation.n", int),
    ("trainer.val_before_train", "trainer.validate_before", bool),
    ("ray_kwargs.timeline_json_file", "runtime.timeline", str),
)
"""verl's key, ours, and what makes our value of verl's."""
OF_EVERY_JOB: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("trainer.total_epochs", "trainer.total_epochs", int),
    ("trainer.total_training_steps", "trainer.total_steps", int),
    ("trainer.project_name", "project", str),
    ("trainer.experiment_name", "experiment", str),
    ("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints", int),
    ("trainer.max_ckpt_to_keep", "trainer.keep_checkpoints", int),
    ("trainer.async_weight_update", "trainer.name", lambda is_on: "streaming" if is_on else None),
)
"""Those of reinforcement learning and of fine-tuning."""

_Condition = Callable[[Rules], Any] | None
INERT: tuple[tuple[str, _Condition, str], ...] = (
    ("actor.use_kl_loss actor.kl_loss_coef actor.kl_loss_type", lambda r: not r.get("actor.use_kl_loss"), "there is no KL penalty in the loss: use_kl_loss is off"),
    ("algorithm.use_kl_in_reward algorithm.kl_ctrl algorithm.kl_penalty", lambda r: not r.get("algorithm.use_kl_in_reward"), "there is no KL penalty in the reward: use_kl_in_reward is off"),
    ("algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon", None, "the coefficient is fixed"),
    ("algorithm.filter_groups", lambda r: not r.get("algorithm.filter_groups.enable"), "no group is left out"),
    ("data.gen_batch_size algorithm.filter_groups.max_inflight_gen_batches", None, "a step generates the prompts that it trains on"),
    ("reward.reward_kwargs.overlong_buffer_cfg reward.reward_kwargs.max_resp_len", None, "the longest response is data.max_response_length, and no other penalty is on it"),
    ("critic trainer.critic_warmup", lambda r: not r.trains_critic, "there is a critic where the estimator requires values, as gae does"),
    ("critic.ppo_mini_batch_size critic.ppo_epochs critic.shuffle critic.model.path", lambda r: r.trains_critic, "as the actor's"),
    ("critic.strategy ref.strategy critic.megatron ref.megatron ref.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size critic.fsdp critic.veomni ref.veomni ref.fsdp_config critic.model.enable_gradient_checkpointing critic.model.enable_activation_offload critic.model.lora_rank critic.model.lora_alpha critic.model.target_modules", None, "the critic and the reference have the actor's engine and layout"),
    ("rollout.multi_turn rollout.agent.default_agent_loop", lambda r: "rollout.agent_loop.name" not in r.draft.values, "a sample is one response"),
    ("rollout.multi_turn", None, "the episode has no other limits"),
    ("rollout.val_kwargs.top_p rollout.val_kwargs.top_k", None, "greedy validation takes the most likely token"),
    ("rollout.free_cache_engine", None, "the rollout has accelerators of its own, or stays on them"),
    ("rollout.dtype", None, "model.dtype is that of the rollout, too"),
    ("rollout.prometheus", None, "replicas give no metrics"),
    ("rollout.log_prob_max_token_len_per_gpu ref.log_prob_max_token_len_per_gpu", None, "log-probabilities are computed with the actor's budget of tokens"),
    ("=rollout.nnodes =rollout.n_gpus_per_node rollout.nnodes rollout.n_gpus_per_node", None, "every role is where runtime.pools says"),
    ("=rollout.n", lambda r: r.get("async_training"), "the rollout's n is actor_rollout_ref.rollout.n"),
    ("algorithm.rollout_correction", None, "settings of what is off"),
    ("actor.loss_scale_factor", None, "of seq-mean-token-sum-norm alone"),
    ("actor.policy_loss actor.tau_pos actor.tau_neg", None, "settings of other losses"),
    ("reward.custom_reward_function", lambda r: not r.get("reward.custom_reward_function.path"), "rows are scored by the function of their data_source"),
    ("reward.reward_model reward_model.enable", lambda r: not r.get("reward.reward_model.enable"), "no reward model scores"),
    ("data.custom_cls", lambda r: not r.get("data.custom_cls.path"), "rows are read from files"),
    ("data.apply_chat_template_kwargs", None, "it is empty"),
    ("data.shuffle", lambda r: r.get("data.shuffle"), "rows are shuffled"),
    ("distillation", lambda r: not r.get("distillation.enabled"), "there is no teacher"),
    ("distillation.enabled distillation.distillation_loss.topk", None, "the teacher's stages say it"),
    ("trainer.device", None, "accelerators are those of the machine"),
    ("trainer.nnodes trainer.n_gpus_per_node", None, "one accelerator needs no runtime"),
    ("trainer.resume_mode", None, "a run goes on from its newest checkpoint"),
    ("global_profiler.tool global_profiler.steps", None, "nothing is profiled"),
)  # fmt: skip
"""Keys that have no effect in verl where the condition holds, or in every case unless a rule has met them, and why."""


def apply_tables(rules: Rules) -> None:
    """Translate the keys of the tables; fine-tuning has those of every job alone."""
    for theirs, ours, cast in OF_EVERY_JOB if rules.job.finetunes else DIRECT + OF_EVERY_JOB:
        rules.same(theirs, ours, cast)
    for given in rules.job.below(rules.full("model.override_config")):
        name = given.key.rpartition(".")[2]
        if given.value in ({}, None) or (name.endswith(("dropout", "pdrop")) and given.value == 0):
            rules.draft.idle("models are trained without dropout, and as they are", given.key)
        elif ".moe_config." in given.key or name == "num_nextn_predict_layers":
            rules.draft.idle("layers of multi-token prediction are not loaded", given.key)
        elif name == "attn_implementation":
            rules.draft.put("model.attn_implementation", given.value, given.key)
        else:
            rules.draft.put(f"model.override_config.{name}", given.value, given.key)
    for key, value in (rules.get("ray_kwargs.ray_init") or {}).items():
        if key not in ("runtime_env", "num_cpus"):
            rules.put(f"runtime.ray_init.{key}", value, f"ray_kwargs.ray_init.{key}")
    for key, value in (rules.get("data.apply_chat_template_kwargs") or {}).items():
        rules.put(f"data.chat_template_args.{key}", value, f"data.apply_chat_template_kwargs.{key}")
    if (path := rules.get("data.custom_cls.path")) is not None:
        why = "a class written for verl needs the package dovetail-verl-shim"
        rules.put("data.source.path", path, "data.custom_cls.path", why=why)
        rules.put("data.source.attribute", rules.get("data.custom_cls.name"), "data.custom_cls.name")  # fmt: skip


def note_inert(rules: Rules) -> None:
    """Note the keys that have no effect; last, so that they outweigh nothing."""
    for keys, condition, why in INERT:
        if condition is None or condition(rules):
            rules.idle(why, *keys.split())
