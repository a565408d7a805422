"""Translates verl's keys of the algorithm: estimator, loss, KL, rollout correction and filters."""

from __future__ import annotations

import math
from typing import Any

from dovetail_migrate.verl.compose import table
from dovetail_migrate.verl.rules import Rules

_OF_GROUPS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
_LOSSES_AS_ESTIMATORS = ("gspo", "cispo", "sapo")
_LOSS, _ADVANTAGE = "algorithm.policy_loss", "algorithm.advantage"


def algorithm(rules: Rules) -> None:
    """Translate verl's keys of the algorithm: estimator, loss, aggregation, KL, rollout correction and filters."""
    estimator(rules)
    loss(rules)
    aggregation(rules)
    kl(rules)
    correction(rules)
    filters(rules)


def estimator(rules: Rules) -> None:
    """Translate the advantage estimator."""
    key = "algorithm.adv_estimator"
    name = str(rules.get(key, "gae"))
    ours = table("estimators").get(name)
    if name in _LOSSES_AS_ESTIMATORS:
        ours = "grpo"
        rules.draft.values[f"{_LOSS}.name"] = name
    if ours is None:
        rules.refuse(f"the estimator {name}", key)
    elif rules.sizes.n == 1 and ours in _OF_GROUPS and not rules.get("distillation.enabled"):
        why = f"verl's {name} returns the plain score if a prompt has one sample"
        rules.put(f"{_ADVANTAGE}.name", "score", key, why=why)
        ours = "score"
    else:
        why = f"{name} is a policy loss in Dovetail; its advantages are GRPO's" if name != ours else ""  # fmt: skip
        rules.put(f"{_ADVANTAGE}.name", ours, key, why="" if "vectorized" in name else why)
    if ours in ("gae", "reinforce_plus_plus"):
        rules.same("algorithm.gamma", f"{_ADVANTAGE}.gamma", float)
    if ours == "gae":
        rules.same("algorithm.lam", f"{_ADVANTAGE}.lam", float)
    if ours in ("grpo", "gdpo", "grpo_passk"):
        rules.same("algorithm.norm_adv_by_std_in_grpo", f"{_ADVANTAGE}.norm_by_std", bool)
    if ours == "gdpo":
        rules.same("algorithm.gdpo_reward_keys", f"{_ADVANTAGE}.components", list)
        rules.same("algorithm.gdpo_reward_weights", f"{_ADVANTAGE}.weights", list)
    rules.idle(f"the estimator {ours} does not use the key", "algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo")  # fmt: skip


def loss(rules: Rules) -> None:
    """Translate the policy loss."""
    key = "actor.policy_loss.loss_mode"
    mode = str(rules.get(key, "vanilla"))
    if mode not in table("losses"):
        rules.refuse(f"the policy loss {mode}", key)
        return
    name = table("losses")[mode]
    if mode == "vanilla":
        name = rules.draft.values.get(f"{_LOSS}.name", name)
    section = "algorithm.rollout_correction"
    if rules.get(f"{section}.bypass_mode") and rules.get(f"{section}.loss_type") == "reinforce":
        rules.put(f"{_LOSS}.name", "reinforce", f"{section}.loss_type", key)
        return
    rules.put(f"{_LOSS}.name", name, key)
    _clip(rules, name, mode)
    for theirs, ours in table("loss_settings").get(name, {}).items():
        rules.same(theirs, f"{_LOSS}.{ours}", float)


def _clip(rules: Rules, name: str, mode: str) -> None:
    keys = ["actor.clip_ratio_low", "actor.clip_ratio_high"]
    plain = rules.get("actor.clip_ratio", 0.2)
    low, high = (float(rules.get(key, plain)) for key in keys)
    if name in ("ppo_clip", "gspo", "gmpo", "clip_cov", "cispo"):
        floor = low >= 1 and name != "gmpo"
        why = f"ratios are above 0, so verl's bound {low:g} never takes effect either" if floor else ""  # fmt: skip
        below = None if floor and name == "cispo" else min(low, 1.0) if floor else low
        rules.put(f"{_LOSS}.clip_low", below, keys[0], why=why)
        rules.put(f"{_LOSS}.clip_high", high, keys[1])
    elif name == "dppo":
        divergence = "total_variation" if mode == "dppo_tv" else "binary_kl"
        rules.put(f"{_LOSS}.divergence", divergence, "actor.policy_loss.loss_mode")
        why = "" if low == high else f"one threshold holds for both sides; verl has {low:g} and {high:g}"  # fmt: skip
        rules.put(f"{_LOSS}.threshold", high, keys[1], why=why)
        rules.change("dppo does not truncate the weights of tokens", "actor.clip_ratio_c")
    if name == "ppo_clip":
        rules.same("actor.clip_ratio_c", f"{_LOSS}.dual_clip", float)
    if any(rules.get(key) is None for key in keys):
        rules.put(f"{_LOSS}.clip_high", high, "actor.clip_ratio")
    rules.idle(f"verl reads clip_ratio_low and clip_ratio_high ({low:g}, {high:g}), and clip_ratio only if they are null", "actor.clip_ratio")  # fmt: skip
    rules.idle(f"the loss {name} does not use the key", *keys, "actor.clip_ratio_c")


def aggregation(rules: Rules) -> None:
    """Translate the aggregation of token losses."""
    key, section = "actor.loss_agg_mode", "algorithm.loss_aggregation"
    name = str(rules.get(key, "token-mean")).replace("-", "_")
    why = ""
    if rules.draft.values.get(f"{_LOSS}.name") == "sapo" and name != "seq_mean_token_mean":
        name, why = "seq_mean_token_mean", "verl's sapo aggregates this way for every loss_agg_mode"
    if name == "seq_mean_token_sum_norm":
        length = rules.get("actor.loss_scale_factor") or rules.get("data.max_response_length")
        rules.put(f"{section}.length", int(length), "actor.loss_scale_factor")
    rules.put(f"{section}.name", name, key, why=why)


def kl(rules: Rules) -> None:
    """Translate the penalty towards the reference policy, in the loss and in the reward."""
    if rules.get("actor.use_kl_loss"):
        name = str(rules.get("actor.kl_loss_type", "low_var_kl"))
        ours = table("kl").get(name.removesuffix("+"))
        if ours is None:
            rules.refuse(f"the KL estimator {name}", "actor.kl_loss_type")
        plus = "+" if name.endswith("+") and ours in ("k1", "k3") else ""
        coef = float(rules.get("actor.kl_loss_coef", 0.001))
        rules.put("algorithm.kl.in_loss.coef", coef, "actor.kl_loss_coef", "actor.use_kl_loss")
        rules.put("algorithm.kl.in_loss.estimator", f"{ours}{plus}", "actor.kl_loss_type")
    section, control = "algorithm.kl.in_reward", "algorithm.kl_ctrl"
    if rules.get("algorithm.use_kl_in_reward"):
        name = str(rules.get("algorithm.kl_penalty", "kl")).removesuffix("+")
        if name not in table("kl"):
            rules.refuse(f"the KL estimator {name}", "algorithm.kl_penalty")
        coef = float(rules.get(f"{control}.kl_coef", 0.001))
        rules.put(f"{section}.coef", coef, f"{control}.kl_coef", "algorithm.use_kl_in_reward")
        rules.put(f"{section}.estimator", table("kl").get(name), "algorithm.kl_penalty")
        if rules.get(f"{control}.type") == "adaptive":
            rules.same(f"{control}.type", f"{section}.controller.name")
            rules.same(f"{control}.target_kl", f"{section}.controller.target", float)
            rules.same(f"{control}.horizon", f"{section}.controller.horizon", int)


def correction(rules: Rules) -> None:
    """Translate the corrections for a rollout policy that differs from the training policy."""
    section = "algorithm.rollout_correction"
    weights, rejects = rules.get(f"{section}.rollout_is"), rules.get(f"{section}.rollout_rs")
    weights = None if weights in ("None", "null", "") else weights
    bypass, cap = bool(rules.get(f"{section}.bypass_mode")), rules.get("actor.tis_imp_ratio_cap")
    if cap and float(cap) > 0 and weights is None:
        rules.put(f"{section}.name", "decoupled_token_is", "actor.tis_imp_ratio_cap")
        rules.put(f"{section}.weight_upper", float(cap), "actor.tis_imp_ratio_cap")
        return
    if not (bypass or weights or rejects):
        return
    if rules.draft.values.get("rollout.name") == "trtllm":
        rules.refuse("a rollout correction needs log-probabilities, which trtllm does not return", section)  # fmt: skip
    name = "bypass_ppo_clip" if bypass else "disabled"
    rules.put(f"{section}.name", name, f"{section}.bypass_mode")
    rules.put(f"{section}.mode", "bypass" if bypass else "decoupled", f"{section}.bypass_mode")
    if weights and bypass and rules.get(f"{section}.loss_type", "ppo_clip") != "reinforce":
        why = "the clipped ratio to the rollout policy is the correction; verl applies no weights besides"
        rules.idle(why, f"{section}.rollout_is")
    elif weights:
        _weights(rules, section, str(weights), bypass)
    if rejects:
        _rejections(rules, section, str(rejects))
    veto = f"{section}.rollout_token_veto_threshold"
    if least := rules.get(veto):
        worst = {"by": "seq_max_k1", "upper": 1 / float(least)}
        others = rules.draft.values.get(f"{section}.reject", [])
        rules.put(f"{section}.reject", [*others, worst], veto, why="as a criterion of rejection")


def _weights(rules: Rules, section: str, level: str, bypass: bool) -> None:
    key = f"{section}.rollout_is_threshold"
    lower, _, upper = str(rules.get(key, 2.0)).rpartition("_")
    rules.put(f"{section}.weights", level, f"{section}.rollout_is")
    rules.put(f"{section}.weight_upper", float(upper), key)
    if lower:
        rules.put(f"{section}.weight_lower", float(lower), key)
        rules.put(f"{section}.weight_outside", "zero", key)
    rules.same(f"{key}_lower", f"{section}.weight_lower", float)
    normalize = f"{section}.rollout_is_batch_normalize"
    if rules.get(normalize) and bypass:
        rules.change("weights are not normalised in bypass mode", normalize)
    elif rules.get(normalize):
        rules.put(f"{section}.normalize_weights", True, normalize)


def _rejections(rules: Rules, section: str, options: str) -> None:
    key = f"{section}.rollout_rs_threshold"
    names = [table("criteria").get(name.strip(), name.strip()) for name in options.split(",")]
    bounds = [text.strip() for text in str(rules.get(key, "2.0")).split(",")]
    found: list[dict[str, Any]] = []
    for name, bound in zip(names, bounds * (len(names) if len(bounds) == 1 else 1), strict=False):
        lower, _, upper = bound.rpartition("_")
        lower = lower or str(rules.get(f"{key}_lower") or "")
        each: dict[str, Any] = {"by": name, "upper": float(upper)}
        if name.endswith("k1") and lower and not math.isclose(float(lower), 1 / float(upper)):
            each["lower"] = float(lower)
        found.append(each)
    rules.put(f"{section}.reject", found, f"{section}.rollout_rs", key)


def filters(rules: Rules) -> None:
    """Translate the filters of groups, the rounds in which replacements are generated, and the overlong penalty."""
    theirs, prompts = "algorithm.filter_groups", rules.sizes.prompts
    generation = int(rules.get("data.gen_batch_size") or prompts)
    if rules.get(f"{theirs}.enable"):
        metric = rules.get(f"{theirs}.metric")
        # Dovetail's filters see scores before a length penalty, which verl's manager calls `acc`.
        rule = metric == "acc" and rules.get("reward.custom_reward_function.path") is None
        whole = rule or metric in (None, "reward", "score", "seq_reward", "seq_final_reward")
        each = {"name": "equal_rewards"} | ({} if whole else {"component": str(metric)})
        rules.put("algorithm.sample_filters", [each], f"{theirs}.enable", f"{theirs}.metric")
        rounds, key = int(rules.get(f"{theirs}.max_num_gen_batches", 0)), f"{theirs}.max_num_gen_batches"  # fmt: skip
        ours = math.ceil(rounds * max(generation, prompts) / prompts) if rounds > 0 else 100
        why = f"a round generates the prompts that a step still lacks; verl's {rounds} rounds generate {generation} prompts each"
        if rounds <= 0 or ours == rounds:
            why = "" if rounds > 0 else "verl has no limit: it generates until the batch is full"
        rules.put("algorithm.max_generation_rounds", ours, key, why=why)
    if generation > prompts and not rules.get("async_training"):
        rules.change("a round generates only the prompts that the step still lacks", "data.gen_batch_size")  # fmt: skip
    kwargs = "reward.reward_kwargs"
    buffer = f"{kwargs}.overlong_buffer_cfg"
    if rules.get(f"{buffer}.enable"):
        longest = int(rules.get("data.max_response_length"))
        if int(rules.get(f"{kwargs}.max_resp_len", longest)) != longest:
            why = "an overlong penalty whose maximum length differs from data.max_response_length"
            rules.refuse(why, f"{kwargs}.max_resp_len")
        section = "algorithm.overlong_penalty"
        rules.put(f"{section}.buffer", int(rules.get(f"{buffer}.len")), f"{buffer}.len", f"{buffer}.enable")  # fmt: skip
        rules.same(f"{buffer}.penalty_factor", f"{section}.factor", float)
