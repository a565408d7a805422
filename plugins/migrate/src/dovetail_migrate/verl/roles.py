"""Translates verl's settings of the actor and the critic: models, engines and optimizers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from dovetail_migrate.verl.compose import table
from dovetail_migrate.verl.overrides import read_value
from dovetail_migrate.verl.rules import Rules, fitting, on

_OTHER_ENGINES = ("veomni", "torchtitan", "automodel", "fsdp_turbo", "mindspeed", "mindspeed_mm", "mlite")  # fmt: skip
_SECTIONS = ("fsdp_config", "fsdp", "megatron", "veomni", "torchtitan", "automodel")


def engine(rules: Rules) -> None:
    """Translate the actor's engine, parallel layout and token budget."""
    strategy = _strategy(rules)
    name = "megatron" if strategy == "megatron" else "fsdp2"
    why = f"Dovetail has no engine {strategy}; fsdp2 trains the same with parameters sharded over all ranks" if strategy in _OTHER_ENGINES else ""  # fmt: skip
    keys = ["engine@"] if rules.job.finetunes else ["actor.strategy", "model_engine@"]
    rules.put("actor.engine.name", name, *keys, why=why)
    others = (None, strategy, "fsdp", "fsdp2")
    if rules.given("critic.strategy") and rules.trains_critic and rules.get("critic.strategy") not in others:  # fmt: skip
        rules.refuse("two engines in one run: the critic's engine differs from the actor's", "critic.strategy")  # fmt: skip
    shared = _megatron(rules) if name == "megatron" else _fsdp(rules)
    _checkpointing(rules, name)
    if not rules.job.finetunes:
        _offload(rules)
    _lora(rules)
    _budget(rules, shared)


def _strategy(rules: Rules) -> str:
    if rules.job.finetunes:
        megatron = "pipeline_model_parallel_size" in rules.job.values.get("engine", {})
        return "megatron" if megatron else str(rules.get("engine.strategy", "fsdp"))
    strategy = str(rules.get("actor.strategy", "fsdp"))
    chosen = rules.get("model_engine", "dp")
    return str(chosen) if strategy in ("fsdp", "dp") and chosen != "dp" else strategy


def _section(rules: Rules, role: str) -> str:
    """Return the section of verl's config with the engine settings of a role, such as `actor.fsdp_config`."""
    if rules.job.finetunes:
        return "engine"
    megatron = _strategy(rules) == "megatron"
    found = (n for n in _SECTIONS if rules.get(f"{role}.{n}") is not None and (n != "megatron" or megatron))  # fmt: skip
    return f"{role}.{next(found, 'fsdp_config')}"


def _megatron(rules: Rules) -> int:
    """Set Megatron's layout, and return the number of ranks that share a sequence's tokens."""
    section = _section(rules, "actor")
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    tp, pp, cp, ep = wanted = [int(rules.get(f"{section}.{n}_parallel_size", 1)) for n in names]
    heads, kv_heads, experts = rules.shape
    tp = fitting(tp, heads, kv_heads)
    if ep > 1 and rules.sizes.gpus % (tp * cp) == 0:
        # Experts are divided over data-parallel ranks, and can't be combined with pipeline stages.
        pp, ep = 1, fitting(ep, rules.sizes.gpus // (tp * cp), experts)
    for name, size, verls in zip(names, (tp, pp, cp, ep), wanted, strict=True):
        why = f"proposed: verl's {verls} can't be combined with the other sizes or with the model's shape" if size != verls else ""  # fmt: skip
        ours = f"actor.engine.{name.removesuffix('_model')}_parallel_size"
        rules.put(ours, size, f"{section}.{name}_parallel_size", why=why)
    if not rules.get(f"{section}.sequence_parallel", True) and ep == 1:
        rules.put("actor.engine.sequence_parallel", False, f"{section}.sequence_parallel")
    rules.idle("the engine chooses this itself", f"{section}.sequence_parallel", f"{section}.expert_tensor_parallel_size")  # fmt: skip
    if (rules.get(f"{section}.expert_tensor_parallel_size") or 1) > 1 and ep > 1:
        rules.change("experts are distributed by expert_parallel_size, and single experts are not divided", f"{section}.expert_tensor_parallel_size")  # fmt: skip
    transformer = f"{section}.override_transformer_config"
    for given in rules.job.below(rules.full(transformer)):
        if given.key.endswith("_loss_coeff") or "load_balancing" in given.key:
            of_use = isinstance(given.value, float) and given.value
            (rules.draft.change if of_use else rules.draft.idle)("Dovetail has no auxiliary loss for routers", given.key)  # fmt: skip
    if pp == wanted[1]:
        rules.same(f"{transformer}.num_layers_in_last_pipeline_stage", "actor.engine.last_stage_layers", int)  # fmt: skip
    return cp


def _fsdp(rules: Rules) -> int:
    section = _section(rules, "actor")
    parts = ("actor.ulysses_sequence_parallel_size", f"{section}.ulysses_sequence_parallel_size", f"{section}.ulysses_parallel_size", f"{section}.cp_size")  # fmt: skip
    wanted, heads = max(int(rules.get(key, 1)) for key in parts), rules.shape[0]
    size = fitting(wanted, rules.sizes.gpus, heads)
    why = f"proposed: the largest divisor of verl's {wanted} that divides {rules.sizes.gpus} accelerators{f' and {heads} heads' * (heads > 0)}"
    rules.put("actor.engine.sequence_parallel_size", size, *parts, why=why if size != wanted else "")  # fmt: skip
    shard = int(rules.get(f"{section}.fsdp_size", -1))
    if 0 < shard < rules.sizes.gpus:
        rules.put("actor.engine.shard_size", shard, f"{section}.fsdp_size")
    rules.idle("parameters are sharded over all ranks", f"{section}.fsdp_size")
    if rules.given(f"{section}.reshard_after_forward"):
        rules.same(f"{section}.reshard_after_forward", "actor.engine.reshard_after_forward", bool)
    rules.same(f"{section}.offload_policy", "actor.engine.cpu_offload", on)
    rules.same("model.use_liger", "actor.engine.liger", on)
    if str(rules.get(f"{section}.dtype", "bfloat16")) in ("float16", "fp16"):
        rules.refuse("float16 training", f"{section}.dtype")
    if rules.get(f"{section}.model_dtype") in ("bfloat16", "bf16"):
        rules.change("master weights are float32 in Dovetail; verl keeps them in bfloat16", f"{section}.model_dtype")  # fmt: skip
    return size


def _checkpointing(rules: Rules, name: str) -> None:
    key = "model.enable_gradient_checkpointing"
    granularity = f"{_section(rules, 'actor')}.override_transformer_config.recompute_granularity"
    if name == "megatron":
        rules.same(granularity, "actor.engine.gradient_checkpointing", lambda how: how if how == "selective" else True)  # fmt: skip
    elif not rules.get(key, True):
        rules.put("actor.engine.gradient_checkpointing", False, key)
    else:
        rules.same("model.enable_activation_offload", "actor.engine.offload_activations", on)
    rules.idle("Dovetail recomputes activations in as few layers as memory allows", key, "model.enable_activation_offload")  # fmt: skip


def _offload(rules: Rules) -> None:
    for role in ("actor", "critic", "ref"):
        keys = [f"{_section(rules, role)}.{part}_offload" for part in ("param", "optimizer", "grad")]  # fmt: skip
        if any(rules.get(key) for key in keys) and (role != "critic" or rules.trains_critic):
            alone = not rules.get(keys[0]) and role != "ref"
            rules.put(f"{role}.offload", True, *keys, why="Dovetail offloads the parameters too" if alone else "")  # fmt: skip
        rules.idle("nothing is offloaded", *keys)


def _lora(rules: Rules) -> None:
    of_megatron = int(rules.get("model.lora.rank", 0)) > 0
    rank, alpha, target = (f"model.{key}" for key in (("lora.rank", "lora.alpha", "lora.target_modules") if of_megatron else ("lora_rank", "lora_alpha", "target_modules")))  # fmt: skip
    if int(rules.get(rank, 0)) > 0:
        rules.same(rank, "actor.engine.lora.rank", int)
        rules.same(alpha, "actor.engine.lora.alpha", float)
        modules = rules.get(target, "all-linear")
        if modules != "all-linear" and set(modules) != set(table("lora_layers")):
            listed = [modules] if isinstance(modules, str) else modules
            rules.put("actor.engine.lora.target_modules", [n for m in listed for n in table("lora_layers").get(m, [m])], target)  # fmt: skip
        if of_megatron and rules.get("model.lora.dropout"):
            rules.refuse("dropout in an adapter", "model.lora.dropout")
    if rules.get("model.lora_adapter_path") is not None:
        _adapter(rules, Path(str(rules.get("model.lora_adapter_path"))))
    if "actor.engine.lora" in "".join(rules.draft.values):
        rules.same("model.exclude_modules", "actor.engine.lora.exclude_modules", _pattern)
    rules.idle("there is no adapter, or all linear layers have one", "model.lora", rank, alpha, target, "model.exclude_modules")  # fmt: skip


def _adapter(rules: Rules, directory: Path) -> None:
    """Set the adapter in `directory`, with which training begins; its adapter_config.json gives rank, scale and layers, as in verl."""
    file, why = directory.expanduser() / "adapter_config.json", ""
    saved = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    for theirs, ours in (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "rank_stabilised"), ("target_modules", "target_modules")):  # fmt: skip
        if saved.get(theirs):
            rules.put(f"actor.engine.lora.{ours}", saved[theirs])
    if not saved:
        why = "its adapter_config.json was not found; set rank, alpha and target_modules to the values there"
    rules.put("actor.engine.lora.adapter_path", str(directory), "model.lora_adapter_path", why=why)


def _pattern(modules: Any) -> str:
    """Return module names in peft's form, a list of name endings or one regular expression, as one regular expression."""
    ends = "|".join(map(re.escape, modules)) if isinstance(modules, (list, tuple)) else ""
    return rf"(.*\.)?({ends})" if ends else str(modules)


def _budget(rules: Rules, shared: int) -> None:
    """Set the tokens of a micro-batch: verl's limit is for one accelerator, and is multiplied by the ranks that share a sequence."""
    limit, micro, dynamic = "actor.ppo_max_token_len_per_gpu", "actor.ppo_micro_batch_size_per_gpu", "actor.use_dynamic_bsz"  # fmt: skip
    if rules.job.finetunes:
        limit, micro, dynamic = (f"data.{k}" for k in ("max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_dynamic_bsz"))  # fmt: skip
    longest, key, why = rules.sizes.longest, limit, ""
    budget = int(rules.get(limit, 16384)) * shared
    if not rules.get(dynamic):
        key, why = micro, f"in tokens: {rules.get(micro)} samples of up to {longest}"
        budget = max(int(rules.get(micro) or 1) * longest, 16384)
    if budget < longest:
        budget, why = longest, f"raised to the tokens of one whole sample; verl has {budget}"
    rules.put("actor.max_tokens_per_micro_batch", budget, key, why=why)
    rules.idle("micro-batches are limited by tokens", limit, micro)
    if not rules.job.finetunes and rules.get("ref.log_prob_use_dynamic_bsz"):
        ref = int(rules.get("ref.log_prob_max_token_len_per_gpu", 0)) * shared
        if ref > budget:
            rules.put("ref.max_tokens_per_micro_batch", ref, "ref.log_prob_max_token_len_per_gpu")


def optimizer(rules: Rules, section: str, ours: str, updates: int) -> None:
    """Translate one role's optimizer and schedule.

    Args:
        rules: the rules of the job.
        section: verl's section, such as `actor.optim`.
        ours: the role in Dovetail's config.
        updates: optimizer steps per step of the run. verl advances the schedule once per step, Dovetail once per optimizer step.
    """
    name = str(rules.get(f"{section}.optimizer", "AdamW")).lower()
    known = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "muon": "muon", "sgd": "sgd"}
    if name not in known and "8bit" not in name:
        rules.refuse(f"the optimizer {name}", f"{section}.optimizer")
    else:
        rules.put(f"{ours}.optim.name", known.get(name, "adamw_8bit"), f"{section}.optimizer")
    rules.same(f"{section}.lr", f"{ours}.optim.lr", float)
    rules.same(f"{section}.weight_decay", f"{ours}.optim.weight_decay", float)
    rules.same(f"{section}.betas", f"{ours}.optim.betas", _numbers)
    clip, other = f"{section}.clip_grad", f"{section.removesuffix('.optim')}.grad_clip"
    if rules.job.version == "0.8.0" and rules.given(other) and not rules.given(clip):
        clip, other = other, clip
    rules.same(clip, f"{ours}.grad_clip", float)
    rules.idle(f"verl {rules.job.version} uses {clip.rpartition('.')[2]} instead", other)
    _schedule(rules, section, ours, updates)


def _schedule(rules: Rules, section: str, ours: str, updates: int) -> None:
    old = (f"{section}.{key}" for key in ("lr_decay_style", "warmup_style"))
    key = next((k for k in old if rules.given(k) and rules.get(k)), f"{section}.lr_scheduler_type")
    kind = str(rules.get(key, "constant")).lower()
    if kind in ("constant", "cosine", "linear", "wsd"):
        rules.put(f"{ours}.optim.schedule", kind, key)
    else:
        rules.refuse(f"the schedule {kind}", key)
    lr, least = float(rules.get(f"{section}.lr", 1e-6)), float(rules.get(f"{section}.min_lr", 0) or 0)  # fmt: skip
    if kind != "constant" and least and lr:
        rules.put(f"{ours}.optim.min_lr_ratio", least / lr, f"{section}.min_lr", why=f"as a fraction of the peak learning rate: {least:g} of {lr:g}")  # fmt: skip
    elif kind != "constant":
        rules.same(f"{section}.min_lr_ratio", f"{ours}.optim.min_lr_ratio", float)
    rules.idle("a constant schedule has no minimum", f"{section}.min_lr_ratio", f"{section}.min_lr")
    count, ratio = f"{section}.lr_warmup_steps", f"{section}.lr_warmup_steps_ratio"
    warmup, share = int(rules.get(count) or -1), float(rules.get(ratio) or 0)
    if warmup > 0:
        why = f"in optimizer steps: verl's {warmup} steps have {updates} updates each" if updates > 1 else ""  # fmt: skip
        rules.put(f"{ours}.optim.warmup_steps", warmup * updates, count, why=why)
    elif share > 0 and rules.steps is None:
        rules.refuse("a warm-up as a fraction of the run, whose number of steps is unknown; set --rows to the number of rows in the training files", ratio)  # fmt: skip
    elif share > 0:
        steps = int(share * rules.steps) * updates  # type: ignore[operator]
        rules.put(f"{ours}.optim.warmup_steps", steps, ratio, why=f"in optimizer steps: {share:g} of {rules.steps} steps of {updates} updates")  # fmt: skip
    rules.idle("the other key of the warm-up takes precedence, or the value is 0", count, ratio)


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a list; scripts may give the list in quotes, as text."""
    listed = read_value(value) if isinstance(value, str) else value
    return [float(number) for number in listed]


def critic(rules: Rules) -> None:
    """Translate the critic's settings if the job trains a critic."""
    if not rules.trains_critic:
        return
    if rules.get("algorithm.adv_estimator") != "gae":
        rules.refuse("a critic together with an estimator that requires no values", "critic.enable")
    if rules.given("critic.model.path") and rules.get("critic.model.path") != rules.get("model.path"):  # fmt: skip
        rules.same("critic.model.path", "critic.path")
    sizes = rules.sizes
    mini = min(int(rules.get("critic.ppo_mini_batch_size", sizes.mini_batch)), sizes.prompts)
    epochs = int(rules.get("critic.ppo_epochs", sizes.epochs))
    if mini != sizes.mini_batch:
        rules.put("critic.mini_batch_size", mini, "critic.ppo_mini_batch_size")
    if epochs != sizes.epochs:
        rules.put("critic.epochs", epochs, "critic.ppo_epochs")
    optimizer(rules, "critic.optim", "critic", math.ceil(sizes.prompts / mini) * epochs)
    rules.same("critic.cliprange_value", "critic.value_clip", float)
    rules.same("critic.loss_agg_mode", "critic.loss_aggregation", lambda mode: mode.replace("-", "_"))  # fmt: skip
    rules.same("trainer.critic_warmup", "critic.warmup_steps", int)
    budget = int(rules.get("critic.ppo_max_token_len_per_gpu", 32768)) if rules.get("critic.use_dynamic_bsz") else 16384  # fmt: skip
    rules.put("critic.max_tokens_per_micro_batch", max(budget, sizes.longest), "critic.ppo_max_token_len_per_gpu")  # fmt: skip
