"""Spellings of verl's keys that its versions, its pages and its users' pages have, to the key that the tables have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_A = "actor_rollout_ref"
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"(?:actor_rollout_ref\.)?(actor|ref|rollout|model)\.(.+)", rf"{_A}.\1.\2"),
    (r"(?:reward_model\.)?custom_reward_function\.(path|name)", r"reward.custom_reward_function.\1"),
    (r"reward_model\.reward_fn\.(path|name)", r"reward.custom_reward_function.\1"),
    (r"reward_model\.(reward_manager|manager_mode)", r"reward.reward_manager.name"),
    (r"reward_manager\.(.+)", r"reward.reward_manager.\1"),
    (r"reward\.reward_manager", r"reward.reward_manager.name"),
    (r"reward_model\.reward_kwargs\.(.+)", r"reward.reward_kwargs.\1"),
    (r"reward_model\.overlong_buffer\.(.+)", r"reward.reward_kwargs.overlong_buffer_cfg.\1"),
    (r"reward_model\.sandbox_fusion\.(.+)", r"reward.sandbox_fusion.\1"),
    (r"sandbox_fusion\.(.+)", r"reward.sandbox_fusion.\1"),
    (r"reward_model\.num_workers", r"reward.num_workers"),
    (r"reward(?:_model|\.reward_model)\.model\.path", r"reward.reward_model.model_path"),
    (r"reward_model\.(enable|enable_resource_pool|n_gpus_per_node|nnodes|rollout\..+)", r"reward.reward_model.\1"),
    (rf"{_A}\.actor\.(?:peft|lora)\.(?:lora_rank|r|rank)", rf"{_A}.model.lora_rank"),
    (rf"{_A}\.actor\.(?:peft|lora)\.(?:lora_alpha|alpha)", rf"{_A}.model.lora_alpha"),
    (rf"{_A}\.actor\.(?:peft|lora)\.target_modules", rf"{_A}.model.target_modules"),
    (rf"{_A}\.actor\.(lora_rank|lora_alpha|target_modules)", rf"{_A}.model.\1"),
    (rf"{_A}\.actor\.lr", rf"{_A}.actor.optim.lr"),
    (r"critic\.lr", r"critic.optim.lr"),
    (rf"({_A}\.actor|critic)\.max_grad_norm", r"\1.grad_clip"),
    (rf"{_A}\.rollout\.tensor_parallel_size", rf"{_A}.rollout.tensor_model_parallel_size"),
    (rf"{_A}\.rollout\.online_quant", rf"{_A}.rollout.quantization"),
    (rf"{_A}\.rollout\.multi_turn\.max_turns", rf"{_A}.rollout.multi_turn.max_assistant_turns"),
    (rf"{_A}\.rollout\.multi_turn\.(?:use_)?tool_config_file", rf"{_A}.rollout.multi_turn.tool_config_path"),
    (rf"{_A}\.actor\.(tensor|pipeline|context)((?:_model)?_parallel_size)", rf"{_A}.actor.megatron.\1\2"),
    (rf"{_A}\.model\.backend", rf"{_A}.actor.strategy"),
    (rf"{_A}\.actor\.fsdp_config\.strategy", rf"{_A}.actor.strategy"),
    (r"critic\.(?:model\.)?fsdp_config\.(.+)", r"critic.fsdp.\1"),
    (r"algorithm\.rollout_is", r"algorithm.rollout_correction.rollout_is"),
    (r"algorithm\.(rollout_(?:is|rs)_.+|rollout_rs)", r"algorithm.rollout_correction.\1"),
    (r"trainer\.prometheus\.(.+)", rf"{_A}.rollout.prometheus.\1"),
    (rf"{_A}\.actor\.(loss_mode|clip_cov_\w+|kl_cov_ratio|ppo_kl_coef)", rf"{_A}.actor.policy_loss.\1"),
    (r"algorithm\.sppo_eta", rf"{_A}.actor.sppo_eta"),
)  # fmt: skip
_FINETUNING: tuple[tuple[str, str], ...] = (
    (r"data\.multiturn\.(messages_key|tools_key)", r"data.\1"),
    (r"model\.partial_pretrain", r"model.path"),
    (r"model\.strategy", r"engine.strategy"),
    (r"ulysses_sequence_parallel_size", r"engine.ulysses_sequence_parallel_size"),
    (r"use_remove_padding", r"model.use_remove_padding"),
    (r"data\.micro_batch_size", r"data.micro_batch_size_per_gpu"),
    (r"model\.fsdp_config\.(.+)", r"engine.\1"),
)
_COMPILED = {
    finetunes: tuple((re.compile(pattern), becomes) for pattern, becomes in table)
    for finetunes, table in ((False, _SPELLINGS), (True, _FINETUNING))
}
_LEGACY = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""Roots that verl still has, and copies to `reward`."""


def canonical(key: str, value: Any, tree: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key of verl's tables for a spelling of it, and the value in that key's terms.

    Args:
        key: as it was written.
        value: as it was written.
        tree: the composed config: a root that it has, such as `model` of fine-tuning, is no spelling.
    """
    finetunes = _A not in tree
    for pattern, becomes in _COMPILED[finetunes]:
        if _has(tree, key) and key.partition(".")[0] not in _LEGACY:
            break
        if (match := pattern.fullmatch(key)) is not None:
            key = match.expand(becomes)
    if key.endswith("actor.lora.enabled") and not value:
        return f"{_A}.model.lora_rank", 0
    if key.endswith("rollout.dtype") and value == "fp8":
        return key.removesuffix("dtype") + "quantization", "fp8"
    return key, value


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True
