"""verl's names for keys, and Dovetail's: tables alone."""

from __future__ import annotations

_OPTIMIZERS = {
    f"{role}.optim.{theirs}": f"{role}.optim.{ours}"
    for role in ("actor", "critic")
    for theirs, ours in (
        ("lr", "lr"),
        ("weight_decay", "weight_decay"),
        ("betas", "betas"),
        ("optimizer", "name (such as adamw, muon or sgd)"),
        ("lr_warmup_steps", "warmup_steps"),
        ("lr_warmup_steps_ratio", "warmup_steps (in steps)"),
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
        ("optim.clip_grad", "grad_clip"),
        ("max_grad_norm", "grad_clip"),
        ("strategy", "engine.name"),
        ("ppo_mini_batch_size", "mini_batch_size"),
        ("ppo_epochs", "epochs"),
        ("ppo_micro_batch_size", "max_tokens_per_micro_batch (in tokens)"),
        ("ppo_max_token_len_per_gpu", "max_tokens_per_micro_batch"),
        ("forward_micro_batch_size", "max_tokens_per_micro_batch (in tokens)"),
        ("forward_max_token_len_per_gpu", "max_tokens_per_micro_batch"),
    )
}
_MEGATRONS_OWN = "megatron.override_transformer_config"
_ENGINES = {
    f"{section}.{theirs}": f"{role}.{ours}"
    for section, role in (
        ("actor", "actor"),
        ("critic", "critic"),
        ("critic.model", "critic"),
        ("ref", "ref"),
    )
    for theirs, ours in (
        ("megatron.tensor_model_parallel_size", "engine.tensor_parallel_size (of megatron)"),
        ("megatron.pipeline_model_parallel_size", "engine.pipeline_parallel_size (of megatron)"),
        ("megatron.context_parallel_size", "engine.context_parallel_size (of megatron)"),
        ("megatron.expert_model_parallel_size", "engine.expert_parallel_size (of megatron)"),
        ("megatron.sequence_parallel", "engine.sequence_parallel (of megatron)"),
        (
            f"{_MEGATRONS_OWN}.num_layers_in_last_pipeline_stage",
            "engine.last_stage_layers (of megatron)",
        ),
        (
            f"{_MEGATRONS_OWN}.recompute_granularity",
            "engine.gradient_checkpointing (true, or selective)",
        ),
        ("megatron.param_offload", "offload"),
        ("megatron.grad_offload", "offload"),
        ("megatron.optimizer_offload", "offload"),
        ("fsdp_config.param_offload", "offload"),
        ("fsdp_config.optimizer_offload", "offload"),
        ("fsdp_config.offload_policy", "engine.cpu_offload (of fsdp2)"),
        ("fsdp_config.reshard_after_forward", "engine.reshard_after_forward (of fsdp2)"),
        ("fsdp_config.fsdp_size", "engine.shard_size (of fsdp2)"),
        ("fsdp_config.strategy", "engine.name"),
        ("fsdp_config.ulysses_sequence_parallel_size", "engine.sequence_parallel_size (of fsdp2)"),
        ("fsdp_config.use_torch_compile", "engine.compile (of fsdp2)"),
        ("ulysses_sequence_parallel_size", "engine.sequence_parallel_size (of fsdp2)"),
        ("use_torch_compile", "engine.compile (of fsdp2)"),
    )
}
_LORA = {
    theirs: f"actor.engine.lora{ours}"
    for theirs, ours in (
        ("actor.lora_rank", ".rank"),
        ("actor.lora.enabled", " (null for none)"),
        ("actor.lora.r", ".rank"),
        ("actor.lora.alpha", ".alpha"),
        ("actor.lora.target_modules", ".target_modules"),
        ("actor.peft.peft_type", " (null for none)"),
        ("actor.peft.lora_rank", ".rank"),
        ("actor.peft.lora_alpha", ".alpha"),
        ("actor.peft.target_modules", ".target_modules"),
        ("model.lora_rank", ".rank (leave lora out for 0)"),
        ("model.lora_alpha", ".alpha"),
        ("model.target_modules", ".target_modules"),
    )
} | {
    "critic.model.lora_rank": "critic.engine.lora.rank (with critic.engine.name; leave lora out for 0)",
    "critic.model.lora_alpha": "critic.engine.lora.alpha (with critic.engine.name)",
    "critic.model.target_modules": "critic.engine.lora.target_modules (with critic.engine.name)",
}
_LOSS = {
    "actor.freeze_vision_tower": "actor.engine.freeze_vision (of fsdp2)",
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
_REWARD_MODEL = {
    f"{section}.{theirs}": f"reward.{ours}"
    for section in ("reward_model", "reward.reward_model")
    for theirs, ours in (
        ("enable", "manager.name (reward_model; or leave it out)"),
        ("model.path", "manager.model (of reward_model)"),
        ("model.trust_remote_code", "manager.trust_remote_code (of reward_model)"),
        ("max_length", "manager.max_length (of reward_model)"),
        ("micro_batch_size", "manager.max_tokens_per_batch (in tokens; of reward_model)"),
        ("forward_max_token_len_per_gpu", "manager.max_tokens_per_batch (of reward_model)"),
        ("sandbox_fusion.url", "function.service (of code)"),
    )
}
_ROLES = {
    "critic.cliprange_value": "critic.value_clip",
    "critic.enable": "algorithm.advantage.name (there is a critic where the estimator requires values, as gae does)",
    "critic.loss_agg_mode": "critic.loss_aggregation.name",
    "critic.model.enable_gradient_checkpointing": "critic.engine.gradient_checkpointing (with critic.engine.name)",
    "critic.model.path": "critic.path",
    "ref.log_prob_max_token_len_per_gpu": "ref.max_tokens_per_micro_batch",
    "ref.log_prob_micro_batch_size": "ref.max_tokens_per_micro_batch (in tokens)",
    "ref.model.path": "ref.path",
    "ref.strategy": "ref.engine.name",
    "trainer.critic_warmup": "critic.warmup_steps",
}

VERL_KEYS: dict[str, str] = {
    **_OPTIMIZERS,
    **_TRAINED,
    **_ENGINES,
    **_LORA,
    **_LOSS,
    **_ALGORITHM,
    **_CORRECTION,
    **_OVERLONG,
    **_REWARD_MODEL,
    **_ROLES,
    "async_training.partial_rollout": "trainer.on_sync (abort or keep, of trainer streaming)",
    "async_training.staleness_threshold": (
        "trainer.over_sampling (of trainer streaming; 1 + the threshold, times trainer.sync_every, where it is below 1) "
        "and trainer.max_staleness (in versions)"
    ),
    "async_training.trigger_parameter_sync_step": "trainer.sync_every (of trainer streaming)",
    "custom_reward_function.name": "reward.function.attribute",
    "custom_reward_function.path": "reward.function.path",
    "data.custom_cls.name": "data.source.attribute",
    "data.custom_cls.path": "data.source.path",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.sampler.class_name": "data.sampler.attribute",
    "data.sampler.class_path": "data.sampler.path",
    "data.seed": "seed",
    "data.shuffle": "data.sampler.name",
    "data.tokenizer": "model.tokenizer_path",
    "data.truncation": "data.overlong_prompts",
    "data.trust_remote_code": "model.trust_remote_code",
    "global_profiler.steps": "profile.steps (the first and the last)",
    "global_profiler.tool": "profile.tool",
    "model.custom_chat_template": "model.chat_template",
    "model.enable_activation_offload": "actor.engine.offload_activations (of fsdp2)",
    "model.enable_gradient_checkpointing": "actor.engine.gradient_checkpointing",
    "model.use_liger": "actor.engine.liger (of fsdp2)",
    "ray_kwargs.timeline_json_file": "runtime.timeline (of ray)",
    "reward.custom_reward_function.name": "reward.function.attribute",
    "reward.custom_reward_function.path": "reward.function.path",
    "reward.reward_manager.name": "reward.manager.name",
    "reward_manager.name": "reward.manager.name",
    "reward_model.manager_mode": "reward.manager.name (rate_limited, remote)",
    "reward_model.reward_fn.name": "reward.function.attribute",
    "reward_model.reward_fn.path": "reward.function.path",
    "reward_model.reward_manager": "reward.manager.name",
    "rollout.agent.default_agent_loop": "rollout.agent_loop.name",
    "rollout.dtype": "model.dtype (fp8 is rollout.quantization)",
    "rollout.enable_prefix_caching": "rollout.prefix_caching",
    "rollout.enforce_eager": "rollout.enforce_eager",
    "rollout.expert_parallel_size": "rollout.expert_parallel_size",
    "rollout.free_cache_engine": "rollout.offload",
    "rollout.log_prob_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    "rollout.log_prob_micro_batch_size": "actor.max_tokens_per_micro_batch (in tokens)",
    "rollout.max_model_len": "rollout.max_model_len",
    "rollout.max_num_batched_tokens": "rollout.engine_args.max_num_batched_tokens (of vllm)",
    "rollout.max_num_seqs": "rollout.max_num_seqs",
    "rollout.multi_turn.enable": "rollout.agent_loop",
    "rollout.multi_turn.format": "rollout.agent_loop.parser",
    "rollout.multi_turn.max_assistant_turns": "rollout.agent_loop.max_turns",
    "rollout.multi_turn.max_parallel_calls": "rollout.agent_loop.max_calls_per_turn",
    "rollout.multi_turn.max_tool_response_length": "rollout.agent_loop.max_observation_tokens (in tokens)",
    "rollout.multi_turn.tool_config_path": "rollout.agent_loop.tools",
    "rollout.multi_turn.tool_response_truncate_side": "rollout.agent_loop.observation_cut",
    "rollout.online_quant": "rollout.quantization",
    "rollout.pipeline_model_parallel_size": "rollout.pipeline_parallel_size (of vllm)",
    "rollout.prometheus.port": "rollout.metrics_port (of vllm)",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.quantization": "rollout.quantization",
    "rollout.response_length": "data.max_response_length",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
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
    "trainer.max_critic_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.n_gpus_per_node": "runtime.gpus_per_node",
    "trainer.nnodes": "runtime.nodes",
    "trainer.project_name": "project",
    "trainer.rollout_data_dir": "trainer.samples_per_step (they are in the run directory's samples)",
    "trainer.save_freq": "trainer.save_every",
    "trainer.test_freq": "trainer.validate_every",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.val_before_train": "trainer.validate_before",
    "trainer.validation_data_dir": "trainer.validation_samples (they are in the run directory's samples)",
}
"""verl's key, less the prefix `actor_rollout_ref.` and the ending `_per_gpu` of micro-batch sizes, to Dovetail's key, with a
remark where the meaning differs. Keys of core's sections that have the same name are not listed."""

VERL_SECTIONS: dict[str, str] = {
    "data.apply_chat_template_kwargs": "data.chat_template_args",
    "ray_kwargs.ray_init": "runtime.ray_init (of ray)",
    "rollout.engine_kwargs": "rollout.engine_args (the engine's own names, without its name before them)",
}
"""A section of verl's whose keys are not Dovetail's to know, to where they go."""

NEEDLESS_KEYS: dict[str, str] = {
    "actor_rollout_ref.rollout.mode": "generation is always asynchronous",
    "actor.optim.total_training_steps": "a schedule ends with the run's last step",
    "actor.use_remove_padding": "nothing is padded",
    "actor.use_dynamic_bsz": "micro-batches are always cut by tokens",
    "critic.optim.total_training_steps": "a schedule ends with the run's last step",
    "critic.use_dynamic_bsz": "micro-batches are always cut by tokens",
    "critic.model.use_remove_padding": "nothing is padded",
    "data.return_raw_chat": "prompts are kept as they were",
    "model.use_remove_padding": "nothing is padded",
    "ref.log_prob_use_dynamic_bsz": "micro-batches are always cut by tokens",
    "rollout.calculate_log_probs": "log-probabilities are asked for where something requires them",
    "rollout.log_prob_use_dynamic_bsz": "micro-batches are always cut by tokens",
    "trainer.balance_batch": "ranks get about as many tokens each anyway",
    "trainer.resume_mode": "`dovetail resume RUN_DIRECTORY` goes on with a run",
}
"""verl's keys that Dovetail needs no key for, and why; with the prefix where a plugin here has a key of the same name."""
