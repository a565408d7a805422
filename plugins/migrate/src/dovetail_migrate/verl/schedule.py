"""Translates verl's keys of the loop and its placement: trainer, pools and trackers."""

from __future__ import annotations

import math
from typing import Any

from dovetail_migrate.verl.compose import table
from dovetail_migrate.verl.job import Job
from dovetail_migrate.verl.rules import Rules, Sizes


def counts(job: Job) -> Sizes:
    """Return the counts of a training step, from the job's keys: prompts, samples, updates and GPUs."""
    gpus = int(job.get("trainer.n_gpus_per_node", 8)) * int(job.get("trainer.nnodes", 1))
    if job.finetunes:
        if job.command is not None:
            gpus = (job.command.processes or gpus) * (job.command.nodes or 1)
        examples, length = int(job.get("data.train_batch_size", 256)), int(job.get("data.max_length", 1024))  # fmt: skip
        return Sizes(prompts=examples, n=1, mini_batch=examples, epochs=1, longest=length, gpus=gpus)  # fmt: skip
    prompts = int(job.get("data.train_batch_size", 1024))
    mini = int(job.get("actor_rollout_ref.actor.ppo_mini_batch_size", 256))
    if job.get("async_training"):
        prompts = mini * int(job.get("async_training.require_batches", 1))
    return Sizes(
        prompts=prompts,
        n=int(job.get("actor_rollout_ref.rollout.n", 1)),
        mini_batch=min(mini, prompts),
        epochs=int(job.get("actor_rollout_ref.actor.ppo_epochs", 1)),
        longest=int(job.get("data.max_prompt_length", 512))
        + int(job.get("data.max_response_length", 512)),
        gpus=gpus,
    )


def batches(rules: Rules) -> None:
    """Translate the numbers of prompts per step and per update."""
    key, prompts = "actor.ppo_mini_batch_size", rules.sizes.prompts
    given = int(rules.get(key, 256))
    if rules.get("async_training"):
        why = f"require_batches × ppo_mini_batch_size = {prompts}, as in verl's program"
        rules.put("data.train_batch_size", prompts, "data.train_batch_size", why=why)
        rules.idle("it is a factor of data.train_batch_size", "async_training.require_batches")
    else:
        rules.put("data.train_batch_size", prompts, "data.train_batch_size")
    if given > prompts:
        rules.draft.problems.append(f"verl would refuse this job: {rules.full(key)} = {given} is above data.train_batch_size = {prompts}")  # fmt: skip
    elif prompts % given:
        rules.refuse(f"mini-batches of {given} prompts do not divide a step of {prompts} prompts", key)  # fmt: skip
    rules.put("actor.mini_batch_size", None if given >= prompts else given, key)


def trainer(rules: Rules) -> None:
    """Translate validation, checkpoints and trackers."""
    period = int(rules.draft.values.get("trainer.sync_every", 1)) if rules.get("async_training") else 1  # fmt: skip
    for theirs, ours in (("save_freq", "save_every"), ("test_freq", "validate_every")):
        text = str(rules.get(f"trainer.{theirs}", -1))
        every = max(int(text), 0) if text.lstrip("-").isdigit() else 0
        why = f"in steps: verl counts weight updates, one every {period} steps" if period > 1 and every else ""  # fmt: skip
        rules.put(f"trainer.{ours}", every * period, f"trainer.{theirs}", why=why)
    if not rules.job.finetunes:
        tests = int(rules.draft.values["trainer.validate_every"]) > 0
        rules.put("trainer.validate_after", tests, "trainer.test_freq")
    if rules.get("trainer.val_only"):
        rules.refuse("a run that only validates; use dovetail eval CONFIG", "trainer.val_only")
    resume = str(rules.get("trainer.resume_mode", "auto"))
    if resume == "resume_path":
        rules.refuse("a run that resumes from verl's checkpoint; convert it with dovetail export, and set model.path to the result", "trainer.resume_mode")  # fmt: skip
    elif resume == "disable":
        why = "if the run directory already contains a run, Dovetail refuses to start and overwrites nothing"
        rules.put("trainer.resume", "never", "trainer.resume_mode", why=why)
    if rules.get("trainer.rollout_data_dir") is not None:
        why = "all samples are written to samples/ in the run directory"
        rules.put("trainer.samples_per_step", -1, "trainer.rollout_data_dir", why=why)
    if rules.given("trainer.default_local_dir"):
        why = "the run directory is output_dir/project/experiment"
        rules.put("output_dir", str(rules.get("trainer.default_local_dir")), "trainer.default_local_dir", why=why)  # fmt: skip
    _tracking(rules)


def _tracking(rules: Rules) -> None:
    given, known = rules.get("trainer.logger", ["console"]), table("trackers")
    loggers = [given] if isinstance(given, str) else list(given)
    if missing := [name for name in loggers if name not in known]:
        rules.change(f"there is no tracker {', '.join(missing)}; it is left out", "trainer.logger")
    ours = [known[name] for name in loggers if name in known]
    rules.put("tracking", list(dict.fromkeys([*ours, "jsonl"])), "trainer.logger")


def runtime(rules: Rules) -> None:
    """Translate machines, accelerators and pools."""
    nodes, gpus = int(rules.get("trainer.nnodes", 1)), int(rules.get("trainer.n_gpus_per_node", 8))
    if rules.job.finetunes and rules.job.command is not None:
        gpus, nodes = rules.job.command.processes or gpus, rules.job.command.nodes or nodes
    if (device := rules.get("trainer.device", "cuda")) not in ("cuda", "gpu"):
        rules.refuse(f"the device {device}", "trainer.device")
    pools, keys = _pools(rules, nodes, gpus)
    served = rules.draft.values.get("rollout.name", "hf") != "hf"
    if served and "generate" not in pools and rules.get("rollout.free_cache_engine", True):
        rules.put("rollout.offload", True, "rollout.free_cache_engine")
    if nodes * gpus == 1 and not pools:
        return
    rules.put("runtime.name", "ray", "trainer.nnodes")
    rules.put("runtime.nodes", nodes, "trainer.nnodes")
    rules.put("runtime.gpus_per_node", gpus, "trainer.n_gpus_per_node")
    if pools:
        rules.put("runtime.pools", pools, *keys)


def _pools(rules: Rules, nodes: int, gpus: int) -> tuple[dict[str, Any], list[str]]:
    """Return the pools of roles with accelerators of their own, and the verl keys that request these pools."""
    pools: dict[str, Any] = {}
    keys: list[str] = []
    values = rules.draft.values
    for root in ("=rollout", "rollout"):
        apart = root == "=rollout" or rules.get("trainer.v1.trainer_mode") == "separate_async"
        if apart and int(rules.get(f"{root}.nnodes", 0) or 0) > 0 and not pools and not rules.job.finetunes:  # fmt: skip
            others = [
                role
                for role, sign in (("critic", "critic."), ("ref", "algorithm.kl."))
                if any(key.startswith(sign) for key in values)
            ]
            pools["train"] = _pool(["actor", *others], nodes, gpus)
            keys = [f"{root}.nnodes", f"{root}.n_gpus_per_node"]
            pools["generate"] = _pool("rollout", *(int(rules.get(key, 8)) for key in keys))
    teachers = sorted(key.split(".")[1] for key in values if key.startswith("roles.") and key.endswith(".path"))  # fmt: skip
    if rules.get("distillation.enabled") and int(rules.get("distillation.nnodes", 0)) > 0 and teachers:  # fmt: skip
        own = ["distillation.nnodes", "distillation.n_gpus_per_node"]
        pools["teachers"] = _pool(teachers, *(int(rules.get(key, 8)) for key in own))
        keys += own
    return pools, keys


def _pool(roles: Any, nodes: int, gpus: int) -> dict[str, Any]:
    return {"roles": roles, **({"nodes": nodes} if nodes > 1 else {}), "gpus_per_node": gpus}


def asynchronous(rules: Rules) -> None:
    """Translate verl's one-step-off and fully asynchronous programs, and its trainer's asynchronous modes."""
    module = rules.job.command.module if rules.job.command else ""
    mode = rules.get("trainer.v1.trainer_mode", "sync")
    if rules.get("async_training"):
        _fully(rules)
    elif "one_step_off" in rules.job.config_name + module:
        rules.draft.values |= {"trainer.name": "streaming", "trainer.on_sync": "drain"}
    elif "partial_rollout" in module:
        rules.draft.values |= {"trainer.name": "streaming", "trainer.on_sync": "abort"}
    elif mode in ("colocate_async", "separate_async"):
        rules.put("trainer.name", "streaming", "trainer.v1.trainer_mode")
        rules.put("trainer.on_sync", "abort", "trainer.v1.trainer_mode")
        if mode == "separate_async":
            rules.same("trainer.v1.separate_async.parameter_sync_step", "trainer.sync_every", int)


def _fully(rules: Rules) -> None:
    section = "async_training"
    rules.put("trainer.name", "streaming")
    every = int(rules.get(f"{section}.trigger_parameter_sync_step", 4))
    rules.put("trainer.sync_every", every, f"{section}.trigger_parameter_sync_step")
    share = float(rules.get(f"{section}.staleness_threshold", 0.1))
    why = f"in weight versions, rounded up; trainer.over_sampling follows from {share:g}"
    whole = share == math.ceil(share)
    rules.put("trainer.max_staleness", math.ceil(share), f"{section}.staleness_threshold", why="" if whole else why)  # fmt: skip
    if not whole:
        rules.draft.values["trainer.over_sampling"] = (1 + share) * every
    ends = "abort" if rules.get(f"{section}.partial_rollout", True) else "drain"
    rules.put("trainer.on_sync", ends, f"{section}.partial_rollout")
    if (total := rules.get("=rollout.total_rollout_steps")) is not None:
        why = f"in steps of {rules.sizes.prompts} prompts; verl counts prompts"
        steps = max(1, int(total) // rules.sizes.prompts)
        rules.put("trainer.total_steps", steps, "=rollout.total_rollout_steps", why=why)
