"""verl's names for keys, so that a config written for verl gets Dovetail's key named in the error."""

from __future__ import annotations

from dovetail.config.keys import KeyPath, format_path

_DROPPED_PREFIX = "actor_rollout_ref"
_FOREIGN_ROOTS = frozenset(
    {_DROPPED_PREFIX, "custom_reward_function", "ray_kwargs", "async_training", "global_profiler"}
)

VERL_KEYS: dict[str, str] = {
    "actor.lr": "actor.optim.lr",
    "actor.optim.lr": "actor.optim.lr",
    "actor.optim.weight_decay": "actor.optim.weight_decay",
    "actor.optim.betas": "actor.optim.betas",
    "actor.optim.lr_warmup_steps": "actor.optim.warmup_steps",
    "actor.optim.lr_scheduler_type": "actor.optim.schedule",
    "actor.optim.warmup_style": "actor.optim.schedule",
    "actor.optim.min_lr_ratio": "actor.optim.min_lr_ratio",
    "actor.grad_clip": "actor.grad_clip",
    "actor.max_grad_norm": "actor.grad_clip",
    "actor.strategy": "actor.engine.name",
    "actor.ppo_mini_batch_size": "actor.mini_batch_size",
    "actor.ppo_epochs": "actor.epochs",
    "actor.ppo_micro_batch_size": "actor.max_tokens_per_micro_batch (in tokens)",
    "actor.ppo_micro_batch_size_per_gpu": "actor.max_tokens_per_micro_batch (in tokens)",
    "actor.ppo_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    "actor.clip_ratio": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "actor.clip_ratio_low": "algorithm.policy_loss.clip_low",
    "actor.clip_ratio_high": "algorithm.policy_loss.clip_high",
    "actor.entropy_coeff": "algorithm.entropy.coef",
    "actor.use_kl_loss": "algorithm.kl.in_loss (null for none)",
    "actor.kl_loss_coef": "algorithm.kl.in_loss.coef",
    "actor.kl_loss_type": "algorithm.kl.in_loss.estimator",
    "actor.loss_agg_mode": "algorithm.loss_aggregation.name",
    "actor.policy_loss.loss_mode": "algorithm.policy_loss.name",
    "algorithm.adv_estimator": "algorithm.advantage.name",
    "custom_reward_function.name": "reward.function.attribute",
    "custom_reward_function.path": "reward.function.path",
    "data.custom_cls.name": "data.source.attribute",
    "data.custom_cls.path": "data.source.path",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.seed": "seed",
    "data.shuffle": "data.sampler.name",
    "data.truncation": "data.overlong_prompts",
    "model.path": "model.path",
    "model.trust_remote_code": "model.trust_remote_code",
    "ref.log_prob_max_token_len_per_gpu": "ref.max_tokens_per_micro_batch",
    "ref.strategy": "ref.engine.name",
    "reward.custom_reward_function.name": "reward.function.attribute",
    "reward.custom_reward_function.path": "reward.function.path",
    "reward.reward_manager.name": "reward.manager.name",
    "reward_model.reward_fn.name": "reward.function.attribute",
    "reward_model.reward_fn.path": "reward.function.path",
    "reward_model.reward_manager": "reward.manager.name",
    "rollout.dtype": "model.dtype",
    "rollout.ignore_eos": "rollout.ignore_eos",
    "rollout.n": "rollout.n",
    "rollout.name": "rollout.name",
    "rollout.temperature": "rollout.temperature",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "rollout.top_k": "rollout.top_k",
    "rollout.top_p": "rollout.top_p",
    "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "rollout.val_kwargs.do_sample": "rollout.validation.temperature (0 is greedy)",
    "rollout.val_kwargs.n": "rollout.validation.n",
    "rollout.val_kwargs.temperature": "rollout.validation.temperature",
    "rollout.val_kwargs.top_k": "rollout.validation.top_k",
    "rollout.val_kwargs.top_p": "rollout.validation.top_p",
    "trainer.default_local_dir": "output_dir",
    "trainer.experiment_name": "experiment",
    "trainer.logger": "tracking",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.n_gpus_per_node": "runtime.gpus_per_node",
    "trainer.nnodes": "runtime.nodes",
    "trainer.project_name": "project",
    "trainer.save_freq": "trainer.save_every",
    "trainer.test_freq": "trainer.validate_every",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.val_before_train": "trainer.validate_before",
}
"""verl's key, less the prefix `actor_rollout_ref.`, to Dovetail's key, with a remark where the meaning differs."""


def verl_advice(path: KeyPath) -> str | None:
    """What to write in place of a key of verl's; None where the key does not look like one."""
    keys = path[1:] if path[0] == _DROPPED_PREFIX else path
    ours = VERL_KEYS.get(format_path(keys)) if keys else None
    if ours and ours != format_path(path):
        return f"this is verl's key; Dovetail's is {ours}"
    if path[0] in _FOREIGN_ROOTS:
        return "this is verl's key; Dovetail has none of that name"
    return None
