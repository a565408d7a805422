"""verl's and TRL's names for keys, so that a config written for either gets Dovetail's key named in the error."""

from __future__ import annotations

from dovetail.config.keys import KeyPath, format_path

_DROPPED_PREFIX = "actor_rollout_ref"
_FOREIGN_ROOTS = frozenset(
    {_DROPPED_PREFIX, "custom_reward_function", "ray_kwargs", "async_training", "global_profiler"}
)

_OPTIMIZERS = {
    f"{role}.optim.{theirs}": f"{role}.optim.{ours}"
    for role in ("actor", "critic")
    for theirs, ours in (
        ("lr", "lr"),
        ("weight_decay", "weight_decay"),
        ("betas", "betas"),
        ("lr_warmup_steps", "warmup_steps"),
        ("lr_scheduler_type", "schedule"),
        ("warmup_style", "schedule"),
        ("min_lr_ratio", "min_lr_ratio"),
    )
}
_TRAINED = {
    f"{role}.{theirs}": f"{role}.{ours}"
    for role in ("actor", "critic")
    for theirs, ours in (
        ("lr", "optim.lr"),
        ("grad_clip", "grad_clip"),
        ("max_grad_norm", "grad_clip"),
        ("strategy", "engine.name"),
        ("ppo_mini_batch_size", "mini_batch_size"),
        ("ppo_epochs", "epochs"),
        ("ppo_micro_batch_size", "max_tokens_per_micro_batch (in tokens)"),
        ("ppo_micro_batch_size_per_gpu", "max_tokens_per_micro_batch (in tokens)"),
        ("ppo_max_token_len_per_gpu", "max_tokens_per_micro_batch"),
        ("forward_micro_batch_size", "max_tokens_per_micro_batch (in tokens)"),
        ("forward_micro_batch_size_per_gpu", "max_tokens_per_micro_batch (in tokens)"),
        ("forward_max_token_len_per_gpu", "max_tokens_per_micro_batch"),
    )
}
_ENGINES = {
    f"{role}.{theirs}": f"{role}.{ours}"
    for role in ("actor", "critic", "ref")
    for theirs, ours in (
        ("megatron.tensor_model_parallel_size", "engine.tensor_parallel_size (of megatron)"),
        ("megatron.pipeline_model_parallel_size", "engine.pipeline_parallel_size (of megatron)"),
        ("megatron.context_parallel_size", "engine.context_parallel_size (of megatron)"),
        ("megatron.expert_model_parallel_size", "engine.expert_parallel_size (of megatron)"),
        ("megatron.sequence_parallel", "engine.sequence_parallel (of megatron)"),
        ("megatron.param_offload", "offload"),
        ("megatron.grad_offload", "offload"),
        ("megatron.optimizer_offload", "offload"),
        ("fsdp_config.param_offload", "offload"),
        ("fsdp_config.optimizer_offload", "offload"),
        ("fsdp_config.fsdp_size", "engine.shard_size (of fsdp2)"),
        ("ulysses_sequence_parallel_size", "engine.sequence_parallel_size (of fsdp2)"),
    )
}
_LOSS = {
    "actor.clip_ratio": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "actor.clip_ratio_low": "algorithm.policy_loss.clip_low",
    "actor.clip_ratio_high": "algorithm.policy_loss.clip_high",
    "actor.clip_ratio_c": "algorithm.policy_loss.dual_clip",
    "actor.tau_pos": "algorithm.policy_loss.tau_positive (of sapo)",
    "actor.tau_neg": "algorithm.policy_loss.tau_negative (of sapo)",
    "actor.policy_loss.loss_mode": "algorithm.policy_loss.name",
    "actor.policy_loss.clip_cov_ratio": "algorithm.policy_loss.share (of clip_cov)",
    "actor.policy_loss.clip_cov_lb": "algorithm.policy_loss.cov_low (of clip_cov)",
    "actor.policy_loss.clip_cov_ub": "algorithm.policy_loss.cov_high (of clip_cov)",
    "actor.policy_loss.kl_cov_ratio": "algorithm.policy_loss.share (of kl_cov)",
    "actor.policy_loss.ppo_kl_coef": "algorithm.policy_loss.coef (of kl_cov)",
    "actor.loss_agg_mode": "algorithm.loss_aggregation.name",
    "actor.loss_scale_factor": "algorithm.loss_aggregation.length (of seq_mean_token_sum_norm)",
    "actor.entropy_coeff": "algorithm.entropy.coef",
    "actor.calculate_entropy": "algorithm.entropy.measure",
    "actor.use_kl_loss": "algorithm.kl.in_loss (null for none)",
    "actor.kl_loss_coef": "algorithm.kl.in_loss.coef",
    "actor.kl_loss_type": "algorithm.kl.in_loss.estimator (kl is k1, mse is k2, low_var_kl is k3)",
    "actor.tis_imp_ratio_cap": "algorithm.rollout_correction.weight_upper",
}
_KL_IN_REWARD = "algorithm.kl.in_reward"
_ALGORITHM = {
    "algorithm.adv_estimator": "algorithm.advantage.name",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.lam": "algorithm.advantage.lam (of gae)",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage.norm_by_std",
    "algorithm.gdpo_reward_keys": "algorithm.advantage.components (of gdpo)",
    "algorithm.gdpo_reward_weights": "algorithm.advantage.weights (of gdpo)",
    "algorithm.use_kl_in_reward": f"{_KL_IN_REWARD} (null for none)",
    "algorithm.kl_penalty": f"{_KL_IN_REWARD}.estimator (kl is k1, mse is k2, low_var_kl is k3)",
    "algorithm.kl_ctrl.type": f"{_KL_IN_REWARD}.controller.name",
    "algorithm.kl_ctrl.kl_coef": f"{_KL_IN_REWARD}.coef",
    "algorithm.kl_ctrl.target_kl": f"{_KL_IN_REWARD}.controller.target (of adaptive)",
    "algorithm.kl_ctrl.horizon": f"{_KL_IN_REWARD}.controller.horizon (of adaptive)",
    "algorithm.filter_groups.enable": "algorithm.sample_filters ([equal_rewards], or [] for none)",
    "algorithm.filter_groups.metric": "algorithm.sample_filters[0].component (the whole reward where absent)",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_generation_rounds",
}
_CORRECTION = {
    f"algorithm.{section}{theirs}": f"algorithm.rollout_correction.{ours}"
    for section in ("", "rollout_correction.")
    for theirs, ours in (
        ("rollout_is", "name (such as decoupled_token_is), or its key weights"),
        ("rollout_is_threshold", "weight_upper"),
        ("rollout_is_threshold_lower", "weight_lower"),
        ("rollout_is_level", "weights"),
        ("rollout_is_batch_normalize", "normalize_weights"),
        ("rollout_rs", "reject[0].by"),
        ("rollout_rs_threshold", "reject[0].upper"),
        ("rollout_rs_threshold_lower", "reject[0].lower"),
        ("bypass_mode", "mode"),
        ("bypass_old_logprob_for_rollout", "mode"),
        ("loss_type", "name (bypass_ppo_clip or bypass_pg_is)"),
    )
    if section or theirs.startswith("rollout_")
}
_OVERLONG = {
    f"{section}.{theirs}": f"algorithm.overlong_penalty{ours}"
    for section in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    )
    for theirs, ours in (
        ("enable", " (null for none)"),
        ("len", ".buffer"),
        ("penalty_factor", ".factor"),
    )
}
_ROLES = {
    "critic.cliprange_value": "critic.value_clip",
    "critic.enable": "algorithm.advantage.name (there is a critic where the estimator requires values, as gae does)",
    "critic.loss_agg_mode": "critic.loss_aggregation.name",
    "critic.model.path": "critic.path",
    "ref.log_prob_max_token_len_per_gpu": "ref.max_tokens_per_micro_batch",
    "ref.log_prob_micro_batch_size": "ref.max_tokens_per_micro_batch (in tokens)",
    "ref.log_prob_micro_batch_size_per_gpu": "ref.max_tokens_per_micro_batch (in tokens)",
    "ref.model.path": "ref.path",
    "ref.strategy": "ref.engine.name",
    "trainer.critic_warmup": "critic.warmup_steps",
}

VERL_KEYS: dict[str, str] = {
    **_OPTIMIZERS,
    **_TRAINED,
    **_ENGINES,
    **_LOSS,
    **_ALGORITHM,
    **_CORRECTION,
    **_OVERLONG,
    **_ROLES,
    "custom_reward_function.name": "reward.function.attribute",
    "custom_reward_function.path": "reward.function.path",
    "data.custom_cls.name": "data.source.attribute",
    "data.custom_cls.path": "data.source.path",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.seed": "seed",
    "data.shuffle": "data.sampler.name",
    "data.truncation": "data.overlong_prompts",
    "model.enable_gradient_checkpointing": "actor.engine.gradient_checkpointing",
    "model.lora_alpha": "actor.engine.lora.alpha",
    "model.lora_rank": "actor.engine.lora.rank",
    "model.path": "model.path",
    "model.target_modules": "actor.engine.lora.target_modules",
    "model.trust_remote_code": "model.trust_remote_code",
    "reward.custom_reward_function.name": "reward.function.attribute",
    "reward.custom_reward_function.path": "reward.function.path",
    "reward.reward_manager.name": "reward.manager.name",
    "reward_model.reward_fn.name": "reward.function.attribute",
    "reward_model.reward_fn.path": "reward.function.path",
    "reward_model.reward_manager": "reward.manager.name",
    "rollout.dtype": "model.dtype",
    "rollout.enable_prefix_caching": "rollout.prefix_caching",
    "rollout.free_cache_engine": "rollout.offload",
    "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "rollout.ignore_eos": "rollout.ignore_eos",
    "rollout.log_prob_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    "rollout.log_prob_micro_batch_size": "actor.max_tokens_per_micro_batch (in tokens)",
    "rollout.log_prob_micro_batch_size_per_gpu": "actor.max_tokens_per_micro_batch (in tokens)",
    "rollout.n": "rollout.n",
    "rollout.name": "rollout.name",
    "rollout.temperature": "rollout.temperature",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "rollout.top_k": "rollout.top_k",
    "rollout.top_p": "rollout.top_p",
    "rollout.val_kwargs.do_sample": "rollout.validation.temperature (0 is greedy)",
    "rollout.val_kwargs.n": "rollout.validation.n",
    "rollout.val_kwargs.temperature": "rollout.validation.temperature",
    "rollout.val_kwargs.top_k": "rollout.validation.top_k",
    "rollout.val_kwargs.top_p": "rollout.validation.top_p",
    "trainer.default_local_dir": "output_dir",
    "trainer.experiment_name": "experiment",
    "trainer.log_val_generations": "trainer.validation_samples",
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


_NEEDLESS = {
    "actor.use_dynamic_bsz": "micro-batches are always cut by tokens",
    "critic.use_dynamic_bsz": "micro-batches are always cut by tokens",
    "model.use_remove_padding": "nothing is padded",
    "ref.log_prob_use_dynamic_bsz": "micro-batches are always cut by tokens",
    "rollout.calculate_log_probs": "log-probabilities are asked for where something requires them",
    "rollout.log_prob_use_dynamic_bsz": "micro-batches are always cut by tokens",
}
"""verl's keys that Dovetail needs no key for, and why."""


def verl_advice(path: KeyPath) -> str | None:
    """What to write in place of a key of verl's; None where the key does not look like one."""
    keys = path[1:] if path[0] == _DROPPED_PREFIX else path
    theirs = format_path(keys) if keys else ""
    if theirs in _NEEDLESS:
        return f"this is verl's key; leave it out: {_NEEDLESS[theirs]}"
    ours = VERL_KEYS.get(theirs)
    if ours and ours != format_path(path):
        return f"this is verl's key; Dovetail's is {ours}"
    if path[0] in _FOREIGN_ROOTS:
        return "this is verl's key; Dovetail has none of that name"
    return None


TRL_KEYS: dict[str, str] = {
    "adam_beta1": "actor.optim.betas",
    "adam_beta2": "actor.optim.betas",
    "adam_epsilon": "actor.optim.eps",
    "beta": "algorithm.kl.in_loss.coef",
    "dataset_name": "data.train_files",
    "delta": "algorithm.policy_loss.dual_clip (of ppo_clip)",
    "epsilon": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "epsilon_high": "algorithm.policy_loss.clip_high",
    "eval_steps": "trainer.validate_every",
    "generation_batch_size": "data.train_batch_size (in prompts)",
    "gradient_accumulation_steps": "actor.mini_batch_size (in prompts of one optimizer step)",
    "gradient_checkpointing": "actor.engine.gradient_checkpointing",
    "importance_sampling_level": "algorithm.policy_loss.name (token is ppo_clip, sequence is gspo)",
    "learning_rate": "actor.optim.lr",
    "loss_type": (
        "algorithm.loss_aggregation.name (grpo is seq_mean_token_mean, dapo is token_mean, dr_grpo is "
        "seq_mean_token_sum_norm)"
    ),
    "lr_scheduler_type": "actor.optim.schedule",
    "mask_truncated_completions": "algorithm.sample_filters ([overlong])",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": "actor.grad_clip",
    "max_prompt_length": "data.max_prompt_length",
    "max_steps": "trainer.total_steps",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.n",
    "num_iterations": "actor.epochs",
    "num_train_epochs": "trainer.total_epochs",
    "per_device_train_batch_size": (
        "data.train_batch_size (in prompts of a step) and actor.max_tokens_per_micro_batch (in tokens of a device)"
    ),
    "report_to": "tracking",
    "reward_funcs": "reward.function",
    "reward_weights": "algorithm.advantage.weights (of gdpo)",
    "run_name": "experiment",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "scale_rewards": "algorithm.advantage.norm_by_std",
    "steps_per_generation": "actor.mini_batch_size (in prompts of one optimizer step)",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "use_vllm": "rollout.name (vllm)",
    "vllm_enable_sleep_mode": "rollout.offload",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "warmup_steps": "actor.optim.warmup_steps",
    "weight_decay": "actor.optim.weight_decay",
}
"""A field of TRL's GRPOConfig to Dovetail's key, with a remark where the meaning differs."""


def trl_advice(path: KeyPath) -> str | None:
    """What to write in place of a field of TRL's, wherever it was put; None where the key does not look like one."""
    name = str(path[-1])
    ours = TRL_KEYS.get(name)
    if ours is None or ("_" not in name and len(path) > 2):
        return None
    if path[0] == "critic" and ours.startswith("actor."):
        ours = "critic." + ours.removeprefix("actor.")
    return None if ours == format_path(path) else f"this is TRL's key; Dovetail's is {ours}"
