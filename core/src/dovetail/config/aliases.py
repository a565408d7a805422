"""What to write in place of keys and values of verl's, TRL's and Hydra's, or of what was put in the wrong place."""

from __future__ import annotations

from collections.abc import Container

from dovetail.config.keys import KeyPath, format_path
from dovetail.config.verl_keys import NEEDLESS_KEYS, VERL_KEYS, VERL_SECTIONS

DROPPED_PREFIX = "actor_rollout_ref"
"""The section of verl's whose sections stand at the top here."""
_FOREIGN_ROOTS = frozenset(
    {DROPPED_PREFIX, "custom_reward_function", "ray_kwargs", "async_training", "global_profiler"}
)
_HYDRAS_ROOTS = frozenset({"defaults", "hydra"})


def verl_advice(path: KeyPath) -> str | None:
    """What to write in place of a key of verl's; None where Dovetail has nothing for it."""
    keys = path[1:] if path[0] == DROPPED_PREFIX else path
    given, theirs = format_path(path), format_path(keys)
    if needless := NEEDLESS_KEYS.get(given) or NEEDLESS_KEYS.get(theirs):
        return f"this is verl's key; leave it out: {needless}"
    ours = VERL_KEYS.get(theirs) or VERL_KEYS.get(theirs.removesuffix("_per_gpu"))
    ours = ours or _section_of(keys)
    if ours and ours != given:
        return f"this is verl's key; Dovetail's is {ours}"
    return None


def foreign_advice(path: KeyPath) -> str | None:
    """Whose key it is that Dovetail has nothing for; None where it does not look like one of verl's or Hydra's."""
    if path[-1] == "_target_" or path[0] in _HYDRAS_ROOTS:
        return "this is Hydra's key; leave it out"
    if path[0] in _FOREIGN_ROOTS:
        return "this is verl's key; Dovetail has none of that name"
    return None


def _section_of(keys: KeyPath) -> str | None:
    """Where the keys go of the section of verl's that holds this one."""
    above = (format_path(keys[:length]) for length in range(len(keys), 0, -1))
    return next((VERL_SECTIONS[name] for name in above if name in VERL_SECTIONS), None)


TRL_KEYS: dict[str, str] = {
    "adam_beta1": "actor.optim.betas",
    "adam_beta2": "actor.optim.betas",
    "adam_epsilon": "actor.optim.eps",
    "beta": "algorithm.kl.in_loss.coef",
    "chat_template_kwargs": "data.chat_template_args",
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
    "vllm_mode": "rollout.mode (engine where TRL has colocate), and rollout.offload where both take turns",
    "vllm_server_base_url": "rollout.urls, beside rollout.mode=server",
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


_NAMED_HERE = frozenset(
    part.partition(" ")[0].rstrip(",")
    for text in (*VERL_KEYS.values(), *TRL_KEYS.values())
    for part in text.split(" and ")
)
"""Dovetail's keys that the tables name, those of plugins that were not chosen included."""


def prefixed_advice(path: KeyPath, known: Container[KeyPath]) -> str | None:
    """That a key is Dovetail's but for verl's prefix; None where it is neither of the config's own keys nor in the tables."""
    if path[0] != DROPPED_PREFIX or len(path) == 1:
        return None
    ours = format_path(path[1:])
    if path[1:] in known or ours in _NAMED_HERE:
        return f"this is verl's key; Dovetail's is {ours}"
    return None


_PRESET = "algorithm.preset"
_MISPLACED_PRESETS = (("preset",), ("preset", "name"), ("algorithm", "name"))
_VERL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names of KL estimators to Dovetail's."""
_KL = (("algorithm", "kl", "in_loss"), ("algorithm", "kl", "in_reward"))


def key_advice(path: KeyPath, value: object, known: Container[KeyPath] = ()) -> str | None:
    """What to say of an unknown key with that value; None where the key means nothing elsewhere either; `known` are the config's own keys."""
    return replacement(path, value, known) or foreign_advice(path)


def replacement(path: KeyPath, value: object, known: Container[KeyPath] = ()) -> str | None:
    """What to write in place of an unknown key with that value, or why nothing; None where nothing is known of it."""
    if path in _MISPLACED_PRESETS:
        name = value if isinstance(value, str) else "NAME"
        return f"unknown key; a preset is chosen by {_PRESET}={name}"
    return verl_advice(path) or prefixed_advice(path, known) or trl_advice(path)


def section_advice(path: KeyPath, value: object) -> str | None:
    """What to write in place of a single value for a section; None where it can't be told."""
    if path == ("algorithm",) and isinstance(value, str):
        return f"a preset is chosen by {_PRESET}={value}"
    if path not in _KL:
        return None
    key = format_path(path)
    if value is False:
        return f"write {key}=null for no penalty"
    if value is True:
        return f"write {key}.coef= and the weight of the penalty"
    if isinstance(value, (int, float)):
        return f"write {key}.coef={value}"
    if isinstance(value, str):
        return f"write {key}.estimator={_VERL_ESTIMATORS.get(value, value)}"
    return None


def value_advice(path: KeyPath, value: object) -> str | None:
    """What to write in place of verl's name of a KL estimator; None for any other value."""
    if path[:-1] not in _KL or path[-1] != "estimator" or not isinstance(value, str):
        return None
    ours = _VERL_ESTIMATORS.get(value.removesuffix("+"))
    if ours is None:
        return None
    # verl's `+` swaps the gradient, which a penalty in the reward has none of.
    plus = "+" if value.endswith("+") and path[-2] == "in_loss" and ours != "k2" else ""
    return f'verl\'s "{value}" is "{ours}{plus}"'
