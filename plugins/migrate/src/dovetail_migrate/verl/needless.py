"""verl's keys that Dovetail needs nothing for, each with the reason, and those that it has nothing for."""

from __future__ import annotations

import re

_A = r"actor_rollout_ref\."
_ROLES = rf"(?:{_A}(?:actor|ref)|critic)\."
_ENGINE = rf"(?:{_ROLES}(?:fsdp_config|fsdp|megatron|veomni|torchtitan|automodel)\.|engine\.)"

NEEDLESS: tuple[tuple[re.Pattern[str], str], ...] = tuple((re.compile(pattern), why) for pattern, why in (
    (rf"{_A}hybrid_engine", "where each role lives follows from runtime.pools"),
    (rf"{_A}nccl_timeout|trainer\.ray_wait_register_center_timeout", "runtime.time_limit and runtime.start_timeout end what hangs"),
    (rf"{_A}rollout\.mode", "generation is always asynchronous"),
    (rf"{_A}rollout\.calculate_log_probs|{_A}actor\.use_rollout_log_probs", "log-probabilities are asked for where something requires them"),
    (rf"{_A}rollout\.(?:load_format|enable_sleep_mode|moe_tensor_parallel_size|layered_summon|multi_stage_wake_up|skip_tokenizer_init|disable_log_stats|cudagraph_capture_sizes|logprobs_mode|scheduling_policy|router_config_path|full_determinism|seed|do_sample)", "the rollout engine sees to it itself"),
    (rf"{_A}rollout\.(?:checkpoint_engine\..+|update_weights_bucket_megabytes)", "the weight transport follows from where trainer and rollout compute"),
    (rf"{_A}rollout\.log_prob_(?:micro_batch_size(?:_per_gpu)?|use_dynamic_bsz|max_token_len_per_gpu)", "old log-probabilities are computed with the actor's budget of tokens"),
    (rf"{_A}rollout\.agent\.num_workers", "episodes run in one event loop"),
    (rf"{_A}rollout\.(?:prompt_length|response_length)", "the lengths are data's"),
    (rf"{_A}rollout\.multi_turn\.(?:use_inference_chat_template|tokenization_sanity_check_mode|num_repeat_rollouts)", "the tokens that the policy produced are kept as they are"),
    (rf"{_A}rollout\.(?:trace|profiler|skip|moe_load_balance_metrics_interval)(?:\..+)?", "samples are in the run directory, and profile.tool profiles"),
    (rf"{_A}rollout\.val_kwargs\.do_sample", "rollout.validation.temperature says it: 0 is greedy"),
    (r"(?:actor_rollout_ref\.)?(?:actor\.|critic\.)?model\.use_remove_padding|.*\.use_remove_padding|data\.pad_mode", "nothing is padded"),
    (r".*\.(?:log_prob_)?use_dynamic_bsz", "micro-batches are always cut by tokens"),
    (r".*\.(?:use_fused_kernels|fused_kernel_options\..+|tiled_mlp\..+|use_torch_compile|entropy_from_logits_with_chunking|entropy_from_logits_chunk_size|entropy_checkpointing|pad_to_length|pad_to_length_bucket|pad_bshd_to_minibatch_max)", "log-probabilities are computed in chunks from hidden states"),
    (r".*\.(?:use_prefix_grouper)", "the prompt of a group is computed once: actor.engine.share_prompts"),
    (r".*\.use_shm|data\.use_shm", "a speed-up of loading alone"),
    (r".*model\.hf_config_path", "the config lies beside the model"),
    (r".*\.(?:profiler|tool_config)(?:\..+)?|global_profiler\.(?!tool$|steps$).+|profiler\..+", "profile.tool, profile.steps and profile.roles profile"),
    (rf"{_ROLES}(?:checkpoint\..+|data_loader_seed|rollout_n|load_weight|nccl_timeout|calculate_entropy|calculate_sum_pi_squared|enable)|checkpoint\..+", "checkpoints keep all that a run needs; seeds derive from seed"),
    (rf"{_ROLES}(?:ppo_micro_batch_size(?:_per_gpu)?|log_prob_micro_batch_size(?:_per_gpu)?|forward_micro_batch_size(?:_per_gpu)?|forward_max_token_len_per_gpu)", "micro-batches are cut by tokens, and results do not depend on them"),
    (rf"{_ENGINE}(?:wrap_policy\..+|forward_prefetch|use_orig_params|seed|full_determinism|forward_only|dtype|grad_offload|strategy|use_no_sync_for_gradient_accumulation|turbo_config\..+|model_dtype|use_mbridge|vanilla_mbridge|use_distributed_optimizer|use_dist_checkpointing|dist_checkpointing_prefix|dist_checkpointing_path|dist_ckpt_\w+|distrib_optim_\w+|use_megatron_fsdp|override_mcore_model_config(?:\..+)?|override_ddp_config(?:\..+)?|virtual_pipeline_model_parallel_size|dynamic_context_parallel|max_seqlen_per_dp_cp_rank|activation_gpu_limit|enable_full_shard|attn_implementation|\w+_implementation|mixed_precision(?:\..+)?|init_device|basic_modules|enable_reentrant|ckpt_manager|load_checkpoint_path|rms_norm_\w+|extra)", "the engine sees to it itself: float32 masters, sharded over all ranks"),
    (rf"{_ENGINE}override_transformer_config\.(?:\w*fusion|persist_layer_norm|use_flash_attn|attention_backend|moe_\w*dispatcher\w*|moe_enable_deepep|moe_grouped_gemm|moe_router_dtype|moe_shared_expert_overlap|moe_router_(?:bias_update_rate|enable_expert_bias|pre_softmax)|deallocate_pipeline_outputs|use_naive_l2norm|recompute_\w+|num_layers_in_\w+|pipeline_model_parallel_layout|account_for_\w+|variable_seq_lengths|sequence_parallel|overlap_\w+|(?:attention|hidden)_dropout|gradient_accumulation_fusion|swap_\w+|use_\w+|context_parallel_size|context_parallel_algo|normalization)", "fusions, overlaps and kernels are the engine's; its result does not depend on them"),
    (rf"(?:{_A}(?:actor|ref)|critic)?\.?optim\.(?:optimizer_impl|total_training_steps|num_cycles|zero_indexed_step|warmup_style|lr_warmup_init|weight_decay_incr_style|lr_wsd_decay_s\w+|use_checkpoint_opt_param_scheduler|lr_decay_steps|\w*_dtype|use_precision_aware_optimizer|use_layer_wise_distributed_optimizer|override_optimizer_config(?:\..+)?)", "a schedule ends with the run's last step; moments are float32"),
    (r"data\.(?:return_raw_chat|return_raw_input_ids|return_full_prompt|return_multi_modal_inputs|mm_processor_kwargs(?:\..+)?|image_patch_size|dataloader_num_workers|num_workers|filter_overlong_prompts_workers|reward_fn_key|video_key|audio_key|validation_shuffle|tool_config_path|function_tool_path|tools_key|enable_thinking_key|enable_thinking_default|balance_dp_token|ignore_input_ids_mismatch|datagen\..+|val_batch_size|max_token_len_per_gpu|messages_key|need_tools_kwargs)", "prompts are kept as rows have them, and read in a thread"),
    (r"trainer\.(?:balance_batch|log_freq|debug|log_val_generations|validation_data_dir|esi_redundant_time|default_hdfs_dir|del_local_ckpt_after_load|use_legacy_worker_impl|checkpoint_callback_class|resume_from_path|profile_interval|profile_steps|max_critic_ckpt_to_keep|use_v1|seed)", "ranks get about as many tokens each, and a run directory keeps samples and checkpoints"),
    (r"trainer\.v1\..+|transfer_queue\..+|skip\..+", "how samples travel between processes is the runtime's"),
    (r"async_training\.(?!staleness|trigger|require|partial).+", "which replicas there are is the pool's: runtime.pools, dovetail pool"),
    (r"ray_kwargs\.ray_init\.runtime_env(?:\..+)?|ray_kwargs\.ray_init\.num_cpus", "runtime.env_vars and runtime.runtime_envs set environments"),
    (r"reward\.(?:num_workers|reward_kwargs\.overlong_buffer_cfg\.log|sandbox_fusion\.(?:max_concurrent|memory_limit_mb)|reward_manager\.(?:source|module\..+))", "reward.concurrency and the manager's own limits"),
    (r"(?:reward\.reward_model|reward_model)\.(?!enable$|model_path$|model\.path$).+", "the reward model runs as reward.manager says"),
    (r"critic\.model\.(?:tokenizer_path|external_lib|trust_remote_code)|.*\.router_replay\.(?:record_file|replay_file)", "the critic is read as the actor is"),
    (r"distillation\.(?:distillation_loss\.(?:policy_loss_mode|clip_ratio\w*)|teacher_models\.\w+\.(?:inference\..+|num_replicas|key))", "a teacher is a role of this run: placement is runtime.pools"),
    (rf"{_A}actor\.(?:peft\.peft_type|lora\.enabled)", "the rank says whether there is an adapter"),
    (r"hydra\..+|.*\._target_|_target_|model_engine|engine|optim|model|data\.multiturn\.enable|actor_rollout_ref\.actor\.model_engine", "it chooses verl's classes"),
))  # fmt: skip
"""Patterns of whole keys, and why nothing stands for them here."""

MISSING: tuple[tuple[re.Pattern[str], str], ...] = tuple((re.compile(pattern), why) for pattern, why in (
    (r".*\.qat\..+", "training for quantised inference (QAT)"),
    (r".*\.router_replay\.mode|.*enable_rollout_routing_replay", "replay of the rollout's routes of experts"),
    (r".*model\.mtp\..+", "multi-token prediction"),
    (r".*model\.external_lib", "modules that a job imports (model.external_lib)"),
    (r".*model\.lora_adapter_path|.*lora\.adapter_path", "training that begins with an adapter"),
    (r".*\.override_transformer_config\.fp8\w*", "float8 training"),
    (rf"{_A}rollout\.(?:over_sample_rate|disaggregation\..+)", "rollouts that leave out the slowest, and prefill on replicas of its own"),
    (rf"{_A}rollout\.agent\.(?:agent_loop_config_path|custom_async_server\..+|agent_loop_manager_class)|{_A}rollout\.multi_turn\.interaction_config_path", "agent loops written for verl: write one for kind agent_loop"),
    (r"data\.(?:train_max_samples|val_max_samples)", "a limit on rows: cut the file"),
    (r"algorithm\.(?:use_pf_ppo|pf_ppo\..+)", "PF-PPO's reweighting"),
    (r"reward\.sandbox_fusion\.url", "one sandbox for all sources: set reward.functions.SOURCE={name: code, service: URL}"),
    (r"trainer\.v1\.sampler\.custom_sampler\..+|data\.sampler\..+", "samplers written for verl: write one for kind sampler"),
))  # fmt: skip
"""Patterns of whole keys that Dovetail has no feature for, and which one is missing."""
