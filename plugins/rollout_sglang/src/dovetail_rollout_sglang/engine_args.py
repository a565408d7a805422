"""SGLang's server arguments, derived from a replica's config and context, and the command that starts a server with these arguments."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import torch

from dovetail.interfaces import PluginContext
from dovetail_datasets import overrides_for_engine
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.environment import joining
from dovetail_serving import (
    has_tokenizer,
    merged_arguments,
    model_of,
    refuse_indivisible,
    replica_seed,
    starts_empty,
)

MODULE = "dovetail_rollout_sglang.serve"
"""The module for `python -m`, whose only argument is a JSON object of SGLang's `ServerArgs`."""

_OTHER_ORDERS = frozenset({"enable_priority_scheduling", "schedule_policy", "enable_metrics"})
"""SGLang arguments that, if the user sets one of them, turn off Dovetail's priority scheduling. `enable_priority_scheduling` and
`schedule_policy` choose the order of requests. With `enable_metrics`, SGLang would report separate metrics for each priority."""
_GRAPHS, _MOST_GRAPHS = 512, 1024
"""Number of concurrent samples up to which CUDA graphs are captured: the default without `max_num_seqs`, and the maximum."""


def server_arguments(config: SglangRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """Return the arguments of SGLang's `ServerArgs` without the address: the user's `engine_args`, overridden by Dovetail's arguments.

    A warning names every argument that the user and Dovetail set to different values, and both values.

    Raises:
        ModelError: no model is configured, or its directory does not exist.
        ConfigError: the replica's ranks can't divide the model.
    """
    if context.model is not None:
        refuse_indivisible(
            context.model, ranks=config.attention_ranks(), spread=config.expert_parallel_size
        )
    return merged_arguments(config.engine_args, own_arguments(config, context), context)


def own_arguments(config: SglangRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """Return the server arguments that Dovetail sets, as JSON values."""
    model = model_of(context)
    found: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "random_seed": replica_seed("sglang", context),
        "tp_size": config.tensor_parallel_size,
        "ep_size": config.expert_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_radix_cache": not config.prefix_caching,
        "kv_cache_dtype": config.kv_cache_dtype,
        # Every request gives all sampling parameters; a model's generation_config.json must not change them.
        "sampling_defaults": "openai",
        # Dovetail's routes pass requests to the tokenizer manager of their own process, which must be the only one.
        "tokenizer_worker_num": 1,
        # SGLang's own warm-up sends a request without the token; its refusal would end the server.
        "skip_server_warmup": True,
    }
    optional: dict[str, Any] = {
        "tokenizer_path": model.tokenizer_path,
        "revision": model.revision,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "quantization": config.quantization,
        "disable_cuda_graph": True if config.enforce_eager else None,
        "cuda_graph_max_bs": _graphs_up_to(config),
        "enable_deterministic_inference": True if config.seeding == "per_sample" else None,
        "skip_tokenizer_init": (None if has_tokenizer(model) else True),
        "device": None if torch.accelerator.is_available() else "cpu",
        "load_format": "dummy" if may_start_empty(config, context) else None,
    }
    if overrides := overrides_for_engine(model):
        optional["json_model_override_args"] = json.dumps(overrides)
    found |= {name: value for name, value in optional.items() if value is not None}
    if not _OTHER_ORDERS & config.engine_args.keys():
        found |= {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            "default_priority_value": 0,
            # Priorities order only waiting samples: an interrupted one would be computed again.
            "disable_priority_preemption": True,
            "retraction_policy": "priority",
        }
    if config.max_adapter_rank is not None:
        found |= {
            "enable_lora": True,
            "max_lora_rank": config.max_adapter_rank,
            "lora_target_modules": sorted(config.adapter_modules),
            # Two, because SGLang counts "no adapter" as one.
            "max_loras_per_batch": 2,
        }
    if config.offload and torch.accelerator.is_available():
        found["enable_memory_saver"] = True
        # No backup is needed if a whole update always arrives before the next sample.
        adapted = config.max_adapter_rank is not None
        found["enable_weights_cpu_backup"] = adapted or not context.weights_follow
    return found


def may_start_empty(config: SglangRolloutConfig, context: PluginContext) -> bool:
    """Return whether the server may start with random weights; False with adapters or quantisation, which need the weights on disk."""
    return starts_empty(config, context, kept=config.max_adapter_rank or config.quantization)


def server_command(
    config: SglangRolloutConfig, context: PluginContext, *, host: str, port: int
) -> list[str]:
    """Return program and arguments of the server that a replica starts.

    Raises:
        ModelError: no model is configured, or its directory does not exist.
        ConfigError: the replica's ranks can't divide the model.
    """
    arguments = {**server_arguments(config, context), "host": host, "port": port}
    return [sys.executable, "-m", MODULE, json.dumps(arguments)]


def command_by_hand(config: SglangRolloutConfig, context: PluginContext, *, port: int) -> str:
    """Return the shell command with which a user can start a server that fits this rollout."""
    address = {"host": "127.0.0.1", "port": port}
    arguments = {**config.engine_args, **own_arguments(config, context), **address}
    settings = [f"{name}={value} " for name, value in joining(context).items()]
    return "".join(settings) + shlex.join(["python", "-m", MODULE, json.dumps(arguments)])


def _graphs_up_to(config: SglangRolloutConfig) -> int | None:
    """Return the number of concurrent samples up to which CUDA graphs are captured; None leaves it to SGLang or the user.

    SGLang's default is 256 on most accelerators; steps of more samples would run without graphs.
    """
    chosen = any(name.startswith("cuda_graph_") for name in config.engine_args)
    if chosen or config.enforce_eager or not torch.accelerator.is_available():
        return None
    return min(config.max_num_seqs or _GRAPHS, _MOST_GRAPHS)
