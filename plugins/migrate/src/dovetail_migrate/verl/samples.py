"""Translates verl's keys of the samples: data, rewards and generation."""

from __future__ import annotations

from dovetail_migrate.verl.compose import table
from dovetail_migrate.verl.rules import Rules, fitting


def data(rules: Rules) -> None:
    """Translate the treatment of overlong prompts, and the order of rows."""
    cut, filters = str(rules.get("data.truncation", "error")), "data.filter_overlong_prompts"
    ours = "error" if cut == "error" else f"truncate_{cut}"
    if rules.get(filters):
        rules.put("data.overlong_prompts", "filter", filters)
        rules.idle("prompts that are too long are filtered out before", "data.truncation")
    else:
        rules.put("data.overlong_prompts", ours, "data.truncation", filters)
    if not rules.get("data.shuffle", True):
        rules.put("data.sampler.name", "sequential", "data.shuffle")


def reward(rules: Rules) -> None:
    """Translate the reward functions and managers."""
    key, function = "reward.reward_manager.name", "reward.custom_reward_function"
    manager = str(rules.get(key, "naive"))
    if manager in table("managers"):
        rules.put("reward.manager.name", table("managers")[manager], key)
    else:
        rules.refuse(f"the reward manager {manager}; write a plugin of kind reward_manager", key)
    file = rules.get(f"{function}.path")
    if file is not None:
        if str(file).startswith("pkg://"):
            rules.refuse("a reward function of an installed package; set the path of its file", f"{function}.path")  # fmt: skip
        rules.same(f"{function}.path", "reward.function.path")
        rules.put("reward.function.attribute", str(rules.get(f"{function}.name") or "compute_score"), f"{function}.name")  # fmt: skip
    enable, path = "reward.reward_model.enable", "reward.reward_model.model_path"
    if not rules.get(enable):
        return
    if file is not None or rules.get(path) is None:
        rules.refuse("a reward model that a reward function calls through verl's router; use reward.manager=judge with the model's URL", enable, path)  # fmt: skip
        return
    why = "Dovetail runs the reward model with transformers, without a server; verl serves it"
    rules.put("reward.manager.name", "reward_model", enable, why=why)
    rules.same(path, "reward.manager.model")


def rollout(rules: Rules) -> None:
    """Translate the settings of generation."""
    name, why = str(rules.get("rollout.name", "???")), ""
    if name == "???":
        name, why = "vllm", f"assumed, since the key, which verl {rules.job.version} requires, is absent"  # fmt: skip
    elif name not in table("engines"):
        rules.refuse(f"the rollout engine {name}; supported are {', '.join(table('engines'))}", "rollout.name")  # fmt: skip
        name = "vllm"
    rules.put("rollout.name", name, "rollout.name", why=why)
    if str(rules.get("rollout.dtype", "bfloat16")) in ("float16", "half"):
        rules.refuse("generation in float16", "rollout.dtype")
    if not rules.get("rollout.do_sample", True):
        rules.refuse("greedy training samples", "rollout.do_sample")
    _engine(rules, name)
    _parallel(rules, name)
    _validation(rules)
    _episodes(rules)
    if rules.get("rollout.prometheus.enable") and name == "vllm":
        port = int(rules.get("rollout.prometheus.port", 9090))
        rules.put("rollout.metrics_port", port, "rollout.prometheus.port", "rollout.prometheus.enable")  # fmt: skip


def _engine(rules: Rules, name: str) -> None:
    for theirs, ours in table("engine_keys").items():
        key = f"rollout.{theirs}"
        if ours in table("engines")[name] and (rules.given(key) or ours == "gpu_memory_utilization"):  # fmt: skip
            rules.same(key, f"rollout.{ours}", lambda value: value)
        rules.idle(f"{name} chooses this itself", key)
    batched, chunked = "rollout.max_num_batched_tokens", "rollout.enable_chunked_prefill"
    if name == "vllm" and rules.given(batched):
        rules.same(batched, "rollout.engine_args.max_num_batched_tokens", int)
    if name == "vllm" and rules.get(chunked) is False:
        rules.put("rollout.engine_args.enable_chunked_prefill", False, chunked)
    rules.idle(f"{name} chooses this itself", batched, chunked)
    above = rules.full("rollout.engine_kwargs")
    for given in rules.job.below(above):
        of, _, argument = given.key.removeprefix(f"{above}.").partition(".")
        if of == name and argument and given.value is not None:
            ours = f"rollout.engine_args.{argument.replace('-', '_')}"
            rules.draft.put(ours, given.value, given.key)
        else:
            rules.draft.idle(f"a setting of {of}, which is not used, or an empty setting", given.key)  # fmt: skip


def _parallel(rules: Rules, name: str) -> None:
    """Set how a replica is divided over accelerators; sizes that do not fit the pool are replaced by a proposal."""
    keys = [f"rollout.{part}_parallel_size" for part in ("tensor_model", "pipeline_model", "expert", "data")]  # fmt: skip
    tp, pp, ep, dp = (int(rules.get(key, 1)) for key in keys)
    takes, pool = table("engines")[name], "=rollout" if rules.get("=rollout.nnodes") else "trainer"
    gpus = int(rules.get(f"{pool}.n_gpus_per_node", 8))
    heads = rules.shape[0]
    ranks = fitting(tp, gpus, heads)
    if "tensor_parallel_size" in takes:
        why = f"proposed: the largest divisor of verl's {tp} that divides a machine's {gpus} accelerators{f' and {heads} heads' * (heads > 0)}"
        rules.put("rollout.tensor_parallel_size", ranks, keys[0], why="" if ranks == tp else why)
    if pp > 1 and "pipeline_parallel_size" in takes:
        rules.put("rollout.pipeline_parallel_size", pp, keys[1])
    why = f"at most a replica's {ranks} accelerators; verl has {ep}" if ep > ranks else ""
    if ep > 1 and "expert_parallel_size" in takes:
        rules.put("rollout.expert_parallel_size", min(ep, ranks), keys[2], why=why)
    elif ep > 1 and name == "vllm":
        rules.put("rollout.engine_args.enable_expert_parallel", True, keys[2], why=why)
    if dp > 1:
        rules.change("replicas are independent; as many run as fit into the rollout's pool", keys[3])  # fmt: skip
    rules.idle(f"the size is 1, or {name} has no such setting", *keys)


def _validation(rules: Rules) -> None:
    section = "rollout.val_kwargs"
    sampled = bool(rules.get(f"{section}.do_sample", False))
    temperature = float(rules.get(f"{section}.temperature", 0)) if sampled else 0.0
    greedy = not sampled and rules.given(f"{section}.temperature")
    why = "do_sample is off: verl's validation is greedy" if greedy else ""
    rules.put("rollout.validation.temperature", temperature, f"{section}.temperature", why=why)
    if temperature > 0:
        rules.same(f"{section}.top_p", "rollout.validation.top_p", float)
        rules.same(f"{section}.top_k", "rollout.validation.top_k", int)


def _episodes(rules: Rules) -> None:
    turns, section = "rollout.multi_turn", "rollout.agent_loop"
    loop = str(rules.get("rollout.agent.default_agent_loop", "single_turn_agent"))
    if not rules.get(f"{turns}.enable") and loop == "single_turn_agent":
        return
    if loop not in ("single_turn_agent", "tool_agent"):
        rules.refuse(f"the agent loop {loop}; write a plugin of kind agent_loop", "rollout.agent.default_agent_loop")  # fmt: skip
    rules.put(f"{section}.name", "tool_agent", f"{turns}.enable", "rollout.agent.default_agent_loop")  # fmt: skip
    parser = str(rules.get(f"{turns}.format", "hermes"))
    if parser in table("parsers"):
        rules.put(f"{section}.parser", table("parsers")[parser], f"{turns}.format")
    else:
        rules.refuse(f"the format {parser} of tool calls", f"{turns}.format")
    most, users = (rules.get(f"{turns}.max_{who}_turns") for who in ("assistant", "user"))
    rules.same(f"{turns}.max_assistant_turns", f"{section}.max_turns", int)
    if users is not None and (most is None or int(users) < int(most)):
        why = f"the policy has one more turn after {users} turns of tool results"
        rules.put(f"{section}.max_turns", int(users) + 1, f"{turns}.max_user_turns", why=why)
    if (file := rules.get(f"{turns}.tool_config_path")) is not None:
        tools = [{"name": "verl", "tools_config": str(file)}]
        rules.put(f"{section}.tools", tools, f"{turns}.tool_config_path")
    if rules.get(f"{turns}.function_tool_path") is not None:
        rules.refuse("a file of functions as tools; list each function in rollout.agent_loop.tools", f"{turns}.function_tool_path")  # fmt: skip
    if rules.given(f"{turns}.tool_server"):
        rules.refuse("a tool server; set its URL in the tool mcp", f"{turns}.tool_server")
    rules.same(f"{turns}.max_parallel_calls", f"{section}.max_calls_per_turn", int)
    rules.same(f"{turns}.tool_response_truncate_side", f"{section}.observation_cut")
    length = f"{turns}.max_tool_response_length"
    rules.put(f"{section}.max_observation_tokens", int(rules.get(length, 256)), length, why="in tokens; verl counts characters")  # fmt: skip
