"""Translates a TRL config into the draft of a Dovetail config. Defaults are those of TRL 1.16."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import yaml

from dovetail.errors import nearest
from dovetail_migrate.draft import Draft, KeyFinding, KeyOutcome
from dovetail_migrate.trl.read import Expression, TrlJob

_TABLES = yaml.safe_load((files("dovetail_migrate.trl") / "fields.yaml").read_text("utf-8"))
DEFAULTS: dict[str, dict[str, Any]] = {
    kind: _TABLES["defaults"]["common"] | _TABLES["defaults"][kind]
    for kind in ("grpo", "sft", "dpo")
}
"""TRL's defaults of fields, by kind of config."""
TRL_KEYS: dict[str, str] = {theirs: ours for theirs, ours, _ in _TABLES["direct"]} | _TABLES[
    "means"
]
"""Field of TRL → the equivalent Dovetail key."""
_NEEDLESS = _TABLES["needless"].split()
_CASTS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "dict": dict,
    "epochs": lambda number: max(1, round(float(number))),
}
_AGGREGATIONS = {"grpo": "seq_mean_token_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "seq_mean_token_sum_norm"}  # fmt: skip


def translate_trl(job: TrlJob, processes: int) -> Draft:
    """Translate a TRL config into the draft of a Dovetail config.

    Args:
        job: the result of `read_trl`.
        processes: the number of TRL's processes, since its batch sizes are per process.
    """
    adapter = "peft" if any(key.startswith("peft_config.") for key in job.given) else "use_peft" if job.given.get("use_peft") else ""  # fmt: skip
    draft, values = Draft(), DEFAULTS[job.kind] | _TABLES["adapters"].get(adapter, {}) | job.given
    for key in [key for key in job.given if key.startswith("lora_") and adapter != "use_peft"]:
        draft.idle("use_peft is off", key)
        del values[key]
    for key, value in job.given.items():
        if isinstance(value, Expression) and not key.startswith("trainer."):  # fmt: skip
            draft.refuse(f"{value.source} is not a literal, and the file is parsed but not run; write the value", key)  # fmt: skip
            values[key] = DEFAULTS[job.kind].get(key)
    for theirs, ours, cast in _TABLES["direct"]:
        if values.get(theirs) is not None:
            draft.put(ours, _CASTS[cast](values[theirs]), theirs)
    draft.put("actor.engine.name", "fsdp2")
    updates = _batches(draft, values, job.kind, processes)
    _optimizer(draft, values)
    _adapter(draft, values)
    {"grpo": _grpo, "sft": _sft, "dpo": _dpo}[job.kind](draft, values)
    _loop(draft, values, updates)
    _data(draft, values)
    _judge_rest(draft, job)
    return draft


def _batches(draft: Draft, values: dict[str, Any], kind: str, processes: int) -> int:
    """Set the sizes of a step and of an update, and return the number of optimizer steps in a step."""
    device = int(values["per_device_train_batch_size"]) * processes
    accumulated = int(values["gradient_accumulation_steps"])
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if kind != "grpo":
        why = (
            f"{device // processes} × {accumulated} on {processes} process{'es' * (processes > 1)}"
        )
        draft.put("data.train_batch_size", device * accumulated, *keys, why=why)
        return 1
    n = int(values["num_generations"])
    generation = int(values["generation_batch_size"] or device * int(values["steps_per_generation"] or accumulated))  # fmt: skip
    if generation % n or device * accumulated % n:
        draft.problems.append(f"TRL would refuse this job: batches of {generation} and {device * accumulated} completions can't be divided into groups of num_generations = {n}; set --processes to the number of TRL's processes")  # fmt: skip
        return 1
    why = f"in prompts: {generation} completions of {processes} process{'es' * (processes > 1)}, {n} a prompt"
    draft.put("data.train_batch_size", generation // n, *keys, "steps_per_generation", "generation_batch_size", why=why)  # fmt: skip
    mini = device * accumulated // n
    if mini < generation // n:
        draft.put("actor.mini_batch_size", mini, keys[1], why="in prompts per optimizer step")
    return max(1, generation // (device * accumulated)) * int(values["num_iterations"])


def _optimizer(draft: Draft, values: dict[str, Any]) -> None:
    name = str(values["optim"])
    if "8bit" in name:
        draft.put("actor.optim.name", "adamw_8bit", "optim")
    elif name.startswith("adamw"):
        draft.put("actor.optim.name", "adamw", "optim")
    else:
        draft.refuse(f"the optimizer {name}", "optim")
    draft.put("actor.optim.betas", [float(values[f"adam_beta{i}"]) for i in (1, 2)], "adam_beta1", "adam_beta2")  # fmt: skip
    kind = str(values["lr_scheduler_type"])
    schedule = {"constant_with_warmup": "constant"}.get(kind, kind)
    if schedule in ("constant", "linear", "cosine"):
        draft.put("actor.optim.schedule", schedule, "lr_scheduler_type")
    else:
        draft.refuse(f"the schedule {kind}", "lr_scheduler_type")
    if values.get("warmup_ratio"):
        draft.refuse("a warm-up as a fraction of the run; set warmup_steps", "warmup_ratio")
    if values["fp16"]:
        draft.refuse("float16 training", "fp16")


def _adapter(draft: Draft, values: dict[str, Any]) -> None:
    for prefix in ("peft_config.", "lora_"):
        target, dropout = values.get(f"{prefix}target_modules"), f"{prefix}lora_dropout".replace("lora_lora", "lora")  # fmt: skip
        if target == "all-linear":
            draft.idle("all linear layers are adapted", f"{prefix}target_modules")
        elif target is not None:
            draft.put("actor.engine.lora.target_modules", [target] if isinstance(target, str) else list(target), f"{prefix}target_modules")  # fmt: skip
        if values.get(dropout):
            draft.refuse(f"an adapter with dropout {values[dropout]}", dropout)
        draft.idle("the adapter has no dropout", dropout)
    if values.get("use_peft") and "lora_dropout" not in values:
        draft.change("adapters have no dropout in Dovetail; TRL's default is 0.05", "use_peft")


def _grpo(draft: Draft, values: dict[str, Any]) -> None:
    low, high = float(values["epsilon"]), float(values["epsilon_high"] or values["epsilon"])
    loss, section = str(values["loss_type"]), "algorithm.policy_loss"
    level = str(values["importance_sampling_level"])
    name = {"token": "ppo_clip", "sequence": "gspo"}.get(level)
    if name is None:
        draft.refuse(f"importance ratios by {level}", "importance_sampling_level")
    elif loss in _AGGREGATIONS:
        draft.put(f"{section}.name", name, "importance_sampling_level")
        draft.put(f"{section}.clip_low", low, "epsilon")
        draft.put(f"{section}.clip_high", high, "epsilon_high", "epsilon")
        if name == "ppo_clip":
            delta = values["delta"]
            draft.put(f"{section}.dual_clip", None if delta is None else float(delta), "delta")
        why = "over the tokens of the whole mini-batch, not of each device" if loss == "bnpo" else ""  # fmt: skip
        draft.put("algorithm.loss_aggregation.name", _AGGREGATIONS[loss], "loss_type", why=why)
        if loss == "dr_grpo":
            draft.put("algorithm.loss_aggregation.length", int(values["max_completion_length"]), "max_completion_length")  # fmt: skip
    else:
        draft.refuse(f"the loss {loss}", "loss_type")
    scale = values["scale_rewards"]
    if scale == "batch":
        draft.refuse("rewards divided by the batch's standard deviation", "scale_rewards")
    draft.put("algorithm.advantage.norm_by_std", scale in (True, "group"), "scale_rewards")
    if float(values["beta"]) > 0:
        draft.put("algorithm.kl.in_loss.coef", float(values["beta"]), "beta")
    draft.idle("there is no KL penalty", "beta")
    if values["mask_truncated_completions"]:
        draft.put("algorithm.sample_filters", [{"name": "overlong"}], "mask_truncated_completions")
    draft.put("rollout.top_k", int(values["top_k"] or 0) or -1, "top_k")
    _reference(draft, values)
    _rollout(draft, values)
    functions = values.get("trainer.reward_funcs", values.get("reward_funcs"))
    if functions is not None:
        said = functions.source if isinstance(functions, Expression) else str(functions)
        why = f"set {said} in `reward`: a function in a separate file, which Dovetail imports, or a model"
        draft.change(why, "trainer.reward_funcs", "reward_funcs")


def _reference(draft: Draft, values: dict[str, Any]) -> None:
    if values["sync_ref_model"]:
        update = {"every": int(values["ref_model_sync_steps"]), "decay": 1 - float(values["ref_model_mixup_alpha"])}  # fmt: skip
        draft.put("ref.update", update, "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")  # fmt: skip
    draft.idle("the reference is never updated", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")  # fmt: skip


def _rollout(draft: Draft, values: dict[str, Any]) -> None:
    if not values["use_vllm"]:
        draft.put("rollout.name", "hf", "use_vllm")
        draft.idle("vLLM is not used", *(key for key in values if key.startswith("vllm_")))
        return
    draft.put("rollout.name", "vllm", "use_vllm")
    draft.put("rollout.gpu_memory_utilization", float(values["vllm_gpu_memory_utilization"]), "vllm_gpu_memory_utilization")  # fmt: skip
    draft.put("rollout.tensor_parallel_size", int(values["vllm_tensor_parallel_size"]), "vllm_tensor_parallel_size")  # fmt: skip
    if values.get("vllm_max_model_length"):
        draft.put("rollout.max_model_len", int(values["vllm_max_model_length"]), "vllm_max_model_length")  # fmt: skip
    if values["vllm_mode"] == "server":
        draft.put("rollout.mode", "server", "vllm_mode")
        draft.put("rollout.urls", [str(values.get("vllm_server_base_url") or "http://127.0.0.1:8000")], "vllm_server_base_url")  # fmt: skip
    elif values["vllm_enable_sleep_mode"]:
        draft.put("rollout.offload", True, "vllm_enable_sleep_mode")
    draft.idle("vLLM runs on the accelerators of training", "vllm_mode", "vllm_enable_sleep_mode", "vllm_server_base_url")  # fmt: skip
    mode, section = str(values["vllm_importance_sampling_mode"]), "algorithm.rollout_correction"
    keys = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")  # fmt: skip
    if values[keys[0]]:
        draft.put(f"{section}.name", "decoupled_token_is", keys[0])
        draft.put(f"{section}.weights", mode.partition("_")[0], keys[1])
        draft.put(f"{section}.weight_outside", "zero" if mode.endswith("mask") else "truncate", keys[1])  # fmt: skip
        draft.put(f"{section}.weight_upper", float(values[keys[2]]), keys[2])
    draft.idle("there is no rollout correction", *keys)


def _sft(draft: Draft, values: dict[str, Any]) -> None:
    draft.put("trainer.name", "supervised")
    _cut(draft, values)
    if values["loss_type"] != "nll":
        draft.refuse(f"the loss {values['loss_type']}", "loss_type")
    if not values["assistant_only_loss"]:
        draft.change("Dovetail trains only on the assistant's turns; TRL trains on the whole conversation", "assistant_only_loss")  # fmt: skip
    draft.idle("Dovetail trains only on the assistant's turns", "assistant_only_loss", "completion_only_loss", "loss_type")  # fmt: skip


def _dpo(draft: Draft, values: dict[str, Any]) -> None:
    draft.put("trainer.name", "supervised")
    draft.put("trainer.examples", "preferences")
    draft.put("data.overlong_prompts", "filter", "truncation_mode", why="Dovetail leaves out pairs that are too long; TRL truncates them")  # fmt: skip
    losses = values["loss_type"]
    name = losses if isinstance(losses, str) else losses[0] if len(losses) == 1 else str(losses)
    objective: dict[str, Any] = {"name": "ipo" if name == "ipo" else "dpo"}
    if name not in _TABLES["preferences"]:
        draft.refuse(f"the preference loss {name}; docs/preferences.md lists the supported losses", "loss_type")  # fmt: skip
    objective |= _TABLES["preferences"].get(name, {})
    names = {"beta": "beta"} if name == "ipo" else _TABLES["dpo"]
    objective |= {ours: values[theirs] for theirs, ours in names.items() if values.get(theirs)}
    if name == "robust":
        objective["robust"] = True
    draft.put("actor.objective", objective, "loss_type", *names)
    draft.idle(f"the loss {name} does not use the field, or the field is 0", *_TABLES["dpo"])
    if isinstance(model := values.get("trainer.ref_model"), str):
        draft.put("ref.path", model, "trainer.ref_model")
    elif model is not None:
        draft.change("the reference is the model that training begins with", "trainer.ref_model")
    draft.idle("the reference is the model that training begins with", "trainer.ref_model")
    _reference(draft, values)


def _cut(draft: Draft, values: dict[str, Any]) -> None:
    side = {"keep_start": "right", "keep_end": "left"}[str(values["truncation_mode"])]
    draft.put("data.overlong_prompts", f"truncate_{side}", "truncation_mode")


def _loop(draft: Draft, values: dict[str, Any], updates: int) -> None:
    """Set the run's length, the intervals of checkpoints and validation, the output directory and the trackers.

    Args:
        draft: the draft of the Dovetail config.
        values: TRL's values by field.
        updates: the number of optimizer steps per step of Dovetail; TRL's lengths are in optimizer steps.
    """

    def steps(key: str) -> int:
        return max(1, int(values[key]) // updates)

    why = f"in steps of {updates} updates; TRL counts optimizer steps" if updates > 1 else ""
    if int(values["max_steps"]) > 0:
        draft.put("trainer.total_steps", steps("max_steps"), "max_steps", why=why)
    if values["save_strategy"] == "steps":
        draft.put("trainer.save_every", steps("save_steps"), "save_steps", "save_strategy", why=why)
    if values["eval_strategy"] == "steps" and values["eval_steps"]:
        draft.put("trainer.validate_every", steps("eval_steps"), "eval_steps", "eval_strategy", why=why)  # fmt: skip
    draft.idle("Dovetail saves and validates at the end of the run", "save_steps", "save_strategy", "eval_steps", "eval_strategy", "max_steps")  # fmt: skip
    if values.get("output_dir"):
        draft.put("output_dir", str(values["output_dir"]), "output_dir", why="the run directory is output_dir/project/experiment")  # fmt: skip
    report = values["report_to"]
    names = [report] if isinstance(report, str) else list(report)
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")]  # fmt: skip
    draft.put("tracking", ["console", "jsonl", *known], "report_to")


def _data(draft: Draft, values: dict[str, Any]) -> None:
    for theirs, ours in (("trainer.train_dataset", "data.train_files"), ("dataset_name", "data.train_files"), ("trainer.eval_dataset", "data.val_files")):  # fmt: skip
        if (value := values.get(theirs)) is not None:
            said = value.source if isinstance(value, Expression) else str(value)
            name = "train.parquet" if ours == "data.train_files" else "held_out.parquet"
            draft.put(ours, name, theirs, why=f"save {said} under this name as Parquet or JSONL")


def _judge_rest(draft: Draft, job: TrlJob) -> None:
    for key, value in job.given.items():
        if draft.outcome_of(key) is not None:
            continue
        if key in _NEEDLESS:
            draft.idle("the engine or the run chooses this itself", key)
        elif key in DEFAULTS[job.kind] and value == DEFAULTS[job.kind][key]:
            draft.idle("the value is TRL's default", key)
        else:
            near = nearest(key, [*DEFAULTS[job.kind], *_NEEDLESS])
            why = "Dovetail has no equivalent" if key in DEFAULTS[job.kind] else "not a known field of TRL's configs"  # fmt: skip
            outcome = KeyOutcome.REFUSED if key in DEFAULTS[job.kind] else KeyOutcome.UNKNOWN
            draft.findings.append(KeyFinding(outcome, key, why=f"{why}; did you mean {near}?" if near and near != key else why))  # fmt: skip
