"""The plugins and commands of the project's own distributions, so that an error can say what to install."""

from __future__ import annotations

from dovetail.errors import nearest

_PROVIDES: dict[str, dict[str, str]] = {
    "dovetail-rollout-hf": {"rollout": "hf"},
    "dovetail-rollout-vllm": {"rollout": "vllm"},
    "dovetail-rollout-sglang": {"rollout": "sglang"},
    "dovetail-rollout-trtllm": {"rollout": "trtllm tensorrt_llm"},
    "dovetail-train-fsdp2": {"engine": "fsdp2"},
    "dovetail-train-megatron": {"engine": "megatron"},
    "dovetail-runtime-ray": {"runtime": "ray"},
    "dovetail-tools": {
        "tool": "calculator search http",
        "tool_parser": "hermes qwen qwen25 qwen3 qwen3_coder qwen3_xml xml minimax_m2 llama3_json llama3 json mistral "
        "deepseek_v3 deepseek deepseek_v31 harmony gpt_oss openai",
    },
    "dovetail-agents": {
        "agent_loop": "tool_agent",
        "reward_function": "episode",
        "sample_filter": "episode_outcome",
    },
    "dovetail-gateway": {"agent_loop": "program"},
    "dovetail-environments": {
        "agent_loop": "environments",
        "dataset": "environments",
        "environment": "program simulated_user",
        "reward_function": "environment",
    },
    "dovetail-environments-harbor": {"environment": "harbor"},
    "dovetail-environments-openenv": {"environment": "openenv"},
    "dovetail-environments-reasoning-gym[engine]": {"environment": "reasoning_gym"},
    "dovetail-environments-textarena": {"environment": "textarena"},
    "dovetail-environments-verifiers": {"environment": "verifiers"},
    "dovetail-tools[mcp]": {"tool": "mcp"},
    "dovetail-tools[verl]": {"tool": "verl"},
    "dovetail-verl-shim": {"dataset": "verl"},
    "dovetail-trainers": {"trainer": "on_policy streaming supervised"},
    "dovetail-optimizers": {
        "optimizer": "adamw adamw_8bit muon adafactor sgd",
        "schedule": "constant linear cosine wsd",
    },
    "dovetail-trackers": {"tracker": "alerts"},
    **{
        f"dovetail-trackers[{name}]": {"tracker": name}
        for name in ("wandb", "mlflow", "tensorboard", "swanlab", "trackio", "opentelemetry")
    },
    "dovetail-rollouts": {
        "source": "rollouts",
        "agent_loop": "single_turn",
        "weight_transport": "in_process disk",
    },
    "dovetail-stages": {
        "stage_set": "standard",
        "stage": "old_log_probs_from_rollout score_actor score_ref score_critic logprob_check rollout_correction overlong_penalty "
        "kl_penalty advantage update_critic update_roles update_actor follow_actor",
        "kl_controller": "fixed adaptive",
        "loss_aggregation": "token_mean token_sum seq_mean_token_sum seq_mean_token_mean seq_mean_token_sum_norm",
    },
    "dovetail-console": {"tracker": "console"},
    "dovetail-transports": {"weight_transport": "cuda_ipc nccl shared_memory"},
    "dovetail-distillation": {"objective": "distill", "stage": "score_teacher teacher_advantage"},
    "dovetail-algorithms": {
        "advantage": "grpo dr_grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline gae remax opo gpg grpo_passk gdpo "
        "optimal_token_baseline tir_optimal_token_baseline prime win_rate score bi_level_gae gigpo mt_grpo",
        "objective": "policy value bradley_terry nll dpo ipo simpo cpo orpo kto sppo implicit_prm",
        "policy_loss": "ppo_clip reinforce clip_cov cispo dppo dro gmpo gpg gspo kl_cov sapo",
        "preset": "ppo grpo dr_grpo dapo gspo cispo sapo rloo reinforce_plus_plus remax opo gpg gmpo",
        "rollout_correction": "decoupled_token_is decoupled_seq_is decoupled_token_icepop decoupled_seq_is_rs "
        "decoupled_geo_rs decoupled_geo_rs_token_tis decoupled_geo_rs_seq_tis decoupled_k3_rs decoupled_k3_rs_token_tis "
        "decoupled_k3_rs_seq_tis bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs bypass_pg_is bypass_pg_token_icepop "
        "bypass_pg_geo_rs bypass_pg_geo_rs_token_tis bypass_pg_geo_rs_seq_tis disabled",
        "sample_filter": "equal_rewards overlong score_range",
        "stage": "best_worst_pairs implicit_process_rewards mismatched_responses spin_pairs",
    },
    "dovetail-datasets": {
        "source": "examples",
        "dataset": "files",
        "sampler": "shuffled sequential",
        "data_recipe": "dapo_math geometry3k gsm8k hh_rlhf math reasoning_gym ultrafeedback xlam_function_calling",
    },
    "dovetail-datasets[reasoning_gym]": {"reward_function": "reasoning_gym"},
    "dovetail-rewards": {
        "tool": "python",
        "reward_manager": "naive batch parallel hybrid group remote reward_model judge prime "
        "generative_reward_model process_reward_model",
        "reward_function": "gsm8k exact_match math dapo_math code",
    },
    "dovetail-rewards-extra": {
        "reward_function": "regex_format geometry3k multiple_choice fuzzy_match json_schema length_penalty repetition_penalty "
        "instruction_following",
    },
}
OF_FUNCTIONS = {"tool": "dovetail-tools"}
"""Kind → the distribution that makes plugins of that kind from functions."""
FIRST_PARTY: dict[str, dict[str, str]] = {}
"""Kind → plugin name → the distribution that provides the plugin."""
for _distribution, _kinds in _PROVIDES.items():
    for _kind, _names in _kinds.items():
        FIRST_PARTY.setdefault(_kind, {}).update(dict.fromkeys(_names.split(), _distribution))

COMMANDS = {
    **dict.fromkeys(("plan", "checkpoint", "runs", "watch", "sweep", "doctor"), "dovetail-console"),
    **dict.fromkeys(("eval", "generate", "chat", "export"), "dovetail-inference"),
    "data": "dovetail-datasets",
    **dict.fromkeys(
        ("plugins list", "plugins show", "plugins lock", "plugins verify"), "dovetail-console"
    ),
    "plugins check": "dovetail-sdk",
    "plugins new": "dovetail-sdk",
    "demo": "dovetail-demo",
    "import": "dovetail-migrate",
    "pool": "dovetail-rollouts",
    "report": "dovetail-report",
    "reward": "dovetail-rewards",
    "serve": "dovetail-gateway",
    "sft": "dovetail-trainers",
}
"""Command → the distribution that provides the command."""


def provider(kind: str, name: str) -> str | None:
    """Return the project's own distribution that provides a plugin; None if there is none."""
    return FIRST_PARTY.get(kind, {}).get(name)


def nearest_first_party(kind: str, name: str) -> str | None:
    """Return the project's own plugin whose name is closest to a misspelt name; None if none is close."""
    return nearest(name, FIRST_PARTY.get(kind, {}))
