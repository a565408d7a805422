"""Jobs of verl with configs of their own: supervised fine-tuning, distillation, PRIME, SPIN and SPPO."""

from __future__ import annotations

from typing import Any

from dovetail_migrate.verl.compose import table
from dovetail_migrate.verl.job import Job
from dovetail_migrate.verl.rules import Rules, as_list

_PLAIN = frozenset({
    "main_ppo", "main_ppo_v0", "main_ppo_sync", "main_dapo", "main_entropy", "fully_async_main", "sft_trainer", "sft_trainer_ray",
    "fsdp_sft_trainer", "main_prime", "main_spin", "main_sppo",
})  # fmt: skip
"""Programs whose training loop Dovetail supports, by the last part of their module."""
_OWN_LOOPS = frozenset({
    "async_flow", "dynamo", "atropos", "dance_grpo", "specRL", "spo", "gvpo", "flowrl", "gkd", "verl_tinker", "minicpmo",
})  # fmt: skip
"""Recipes of verl-recipe whose programs have their own training loop."""


def foreign_program(job: Job) -> str | None:
    """Return a message if the job's program has its own training loop, which can't be imported; else None."""
    module = job.command.module if job.command else ""
    if "reward_queue" in module:
        return None  # verl's asynchronous program; Dovetail always scores samples while others are generated
    if module and (set(module.split(".")) & _OWN_LOOPS or module.rpartition(".")[2] not in _PLAIN):
        return f"{module} has its own training loop, which can't be imported; with --partial, only its keys are imported"
    return None


def finetuning(rules: Rules) -> None:
    """Translate the trainer, model and data of verl's supervised fine-tuning."""
    rules.put("trainer.name", "supervised")
    for theirs in ("data.train_files", "data.val_files"):
        rules.same(theirs, theirs, as_list)
    rules.same("model.path", "model.path")
    if rules.get("model.trust_remote_code"):
        rules.put("model.trust_remote_code", True, "model.trust_remote_code")
    rules.put("data.train_batch_size", rules.sizes.prompts, "data.train_batch_size")
    rules.put("data.max_length", rules.sizes.longest, "data.max_length")
    cut = str(rules.get("data.truncation", "error"))
    rules.put("data.overlong_prompts", cut if cut == "error" else f"truncate_{cut}", "data.truncation")  # fmt: skip
    rules.same("data.messages_key", "data.messages_key")


def distillation(rules: Rules) -> None:
    """Translate the teachers and the student's loss of a distillation job."""
    if not rules.get("distillation.enabled"):
        return
    loss, stages = "distillation.distillation_loss", _teachers(rules)
    mode, rewards = str(rules.get(f"{loss}.loss_mode", "k3")), bool(rules.get(f"{loss}.use_task_rewards", True))  # fmt: skip
    settings: dict[str, Any] = {"coef": float(rules.get(f"{loss}.distillation_loss_coef", 1.0))}
    for theirs, ours in (("log_prob_min_clamp", "min_log_prob"), ("loss_max_clamp", "max_divergence")):  # fmt: skip
        if (bound := rules.get(f"{loss}.{theirs}")) is not None:
            settings[ours] = float(bound)
    keys = [f"{loss}.{k}" for k in ("loss_mode", "use_policy_gradient", "use_task_rewards", "distillation_loss_coef", "loss_max_clamp", "log_prob_min_clamp")]  # fmt: skip
    if rules.get(f"{loss}.use_policy_gradient"):
        if mode not in ("k1", "kl"):
            rules.refuse(f"a policy gradient on the divergence {mode}", f"{loss}.loss_mode")
        stages.append({"name": "teacher_advantage", "reward_coef": float(rewards), **settings})
        rules.put("algorithm.stages", stages, *keys)
        return
    if mode not in table("divergences"):
        rules.refuse(f"the divergence {mode}", f"{loss}.loss_mode")
        return
    objective = {"name": "distill", "divergence": table("divergences")[mode], **settings}
    if mode == "forward_kl_topk":
        objective["top_k"] = int(rules.get(f"{loss}.topk", 32))
    if rewards:
        objective["plus"] = {"name": "policy"}
    rules.put("actor.objective", objective, *keys)
    if stages:
        rules.draft.values["algorithm.stages"] = stages


def _teachers(rules: Rules) -> list[dict[str, Any]]:
    """Give each teacher a role. With several teachers, return the stage that assigns data sources to them; else an empty list."""
    section = "distillation.teacher_models"
    named = {name: each for name, each in (rules.get(section) or {}).items() if each.get("model_path")}  # fmt: skip
    sources = {}
    for name, each in named.items():
        role = "teacher" if name == "teacher_model" else f"{name}_teacher"
        rules.put(f"roles.{role}.path", each["model_path"], f"{section}.{name}.model_path")
        sources[str(each.get("key") or "default") if len(named) > 1 else "default"] = role
    return [] if sources == {"default": "teacher"} else [{"name": "score_teacher", "teachers": sources}]  # fmt: skip


_OF_POLICIES = ("algorithm.advantage", "algorithm.policy_loss", "algorithm.kl", "algorithm.entropy", "algorithm.loss_aggregation")  # fmt: skip


def self_play(rules: Rules) -> None:
    """Translate the settings of PRIME, SPIN and SPPO, which are recognised by their programs."""
    program = (rules.job.command.module if rules.job.command else rules.job.config_name).rpartition(".")[2]  # fmt: skip
    values = rules.draft.values
    if program in ("main_prime", "prime_trainer"):
        _prime(rules)
        return
    if program not in ("main_spin", "spin_trainer", "main_sppo", "sppo_trainer"):
        return
    for key in [key for key in values if key.startswith(_OF_POLICIES)]:
        del values[key]
    rules.idle("a preference objective replaces the policy loss", "algorithm.adv_estimator")  # fmt: skip
    if "spin" in program:
        beta = float(rules.get("actor.dpo_beta", 0.1))
        rules.put("actor.objective", {"name": "dpo", "beta": beta}, "actor.dpo_beta")
        values["algorithm.stages"] = ["best_worst_pairs" if rules.sizes.n > 1 else "spin_pairs"]
        every = int(rules.get("trainer.ref_update_freq", 1) or 1)
        rules.put("ref.update", {"every": every}, "trainer.ref_update_freq")
    else:
        eta = float(rules.get("actor.sppo_eta", 1.0))
        rules.put("actor.objective", {"name": "sppo", "eta": eta}, "actor.sppo_eta")
        why = "win rates among a prompt's samples; verl's recipe subtracts the scores' soft mean over the batch"
        rules.put("algorithm.advantage.name", "win_rate", "algorithm.adv_estimator", why=why)
        rules.idle("actor.sppo_eta is used instead", "algorithm.sppo_eta")
        if rules.sizes.n == 1:
            rules.refuse("win rates of a single sample; set rollout.n to 2 or more", "rollout.n")


def _prime(rules: Rules) -> None:
    model, values = "reward_model.model", rules.draft.values
    path = rules.get("reward.reward_model.model_path") or rules.get(f"{model}.path")
    for key in [key for key in values if key.startswith(("algorithm.advantage", "reward.manager"))]:  # fmt: skip
        del values[key]
    rules.put("algorithm.advantage.name", "prime", "algorithm.adv_estimator", why="PRIME's estimator, which combines process rewards and outcome rewards")  # fmt: skip
    rules.same("algorithm.gamma", "algorithm.advantage.gamma", float)
    beta = float(rules.get(f"{model}.beta_train", 0.05))
    rules.put("roles.prm.objective", {"name": "implicit_prm", "beta": beta}, f"{model}.beta_train", f"{model}.loss_type")  # fmt: skip
    rules.same(f"{model}.optim.lr", "roles.prm.optim.lr", float)
    rules.same(f"{model}.optim.weight_decay", "roles.prm.optim.weight_decay", float)
    rules.same(f"{model}.optim.grad_clip", "roles.prm.grad_clip", float)
    if path and path != rules.get("model.path"):
        rules.put("roles.prm.path", path, f"{model}.path", "reward.reward_model.model_path")
        values["roles.prm_ref.path"] = path
        values["algorithm.stages"] = [{"name": "implicit_process_rewards", "reference": "prm_ref"}]
    if rules.get("data.filter_accuracy"):
        bounds = {side: float(rules.get(f"data.accuracy_{side}_bound")) for side in ("lower", "upper")}  # fmt: skip
        each = {"name": "score_range", **bounds}
        rules.put("algorithm.sample_filters", [each], "data.filter_accuracy", "data.accuracy_lower_bound", "data.accuracy_upper_bound")  # fmt: skip
        rounds = int(float(rules.get("data.oversample_factor", 1)))
        rules.put("algorithm.max_generation_rounds", rounds, "data.oversample_factor", why="a round generates the prompts that a step still lacks; verl generates this multiple of the prompts at once")  # fmt: skip
    rules.idle("the process reward model scores the samples once, before its update", "reward_model", "reward.reward_model.enable")  # fmt: skip
