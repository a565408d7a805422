"""vLLM's engine arguments, derived from a replica's config and context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces import BYTES, PluginContext
from dovetail_datasets import max_positions, overrides_for_engine, read_config, read_shape
from dovetail_rollout_vllm.adapters import room_for
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.worker import TRANSFER_ENGINE, WORKER_EXTENSION
from dovetail_serving import (
    has_tokenizer,
    merged_arguments,
    model_of,
    replica_seed,
    starts_empty,
    unknown_argument,
)

CACHE_SLACK = 1.05
"""Ratio of the KV cache's size to the samples' tokens, to allow for partly filled blocks."""
WORKING_SHARE = 0.2
"""Fraction of the engine's share of an accelerator's memory that is left for activations."""


def engine_arguments(config: VllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`: the user's `engine_args`, overridden by Dovetail's arguments.

    A warning names every argument that the user and Dovetail set to different values, and both values.

    Raises:
        ModelError: no model is configured, or its directory does not exist.
        ConfigError: Dovetail does not support an argument.
    """
    _refuse_impossible(config, context)
    return merged_arguments(config.engine_args, own_arguments(config, context), context)


def own_arguments(config: VllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """Return the engine arguments that Dovetail sets, as JSON values."""
    model = model_of(context)
    found: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "seed": replica_seed("vllm", context),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "kv_cache_dtype": config.kv_cache_dtype,
        "skip_tokenizer_init": not has_tokenizer(model),
        # Every request gives all sampling parameters; a model's generation_config.json must not change them.
        "generation_config": "vllm",
        # Log-probabilities of the sampled distribution: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": TRANSFER_ENGINE},
        "worker_extension_cls": WORKER_EXTENSION,
    }
    optional = {
        "tokenizer": model.tokenizer_path,
        "revision": model.revision,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "quantization": config.quantization,
        "hf_overrides": overrides_for_engine(model) or None,
    }
    found |= {name: value for name, value in optional.items() if value is not None}
    if config.ranks_per_replica() > 1 and "distributed_executor_backend" not in config.engine_args:
        # In a Ray actor, vLLM would otherwise request accelerators from Ray's cluster that the replica already has.
        found["distributed_executor_backend"] = "mp"
    if "scheduling_policy" not in config.engine_args:
        found["scheduling_policy"] = "priority"
    if may_start_empty(config, context):
        found["load_format"] = "dummy"
    if config.offload and torch.accelerator.is_available():
        found["enable_sleep_mode"] = True
    if torch.accelerator.is_available() and "kv_cache_memory_bytes" not in config.engine_args:
        cache = cache_bytes(config, context, accelerator_bytes())
        if cache is not None:
            found["kv_cache_memory_bytes"] = cache
    if config.max_adapter_rank is not None:
        found |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": room_for(config.max_adapter_rank),
        }
    return found


def cache_bytes(config: VllmRolloutConfig, context: PluginContext, available: int) -> int | None:
    """Return the bytes of KV cache that the run's samples need on each accelerator; None to size the cache by `gpu_memory_utilization`.

    The result is None if this cache and the weights would leave no room for activations within the fraction `gpu_memory_utilization` of
    the memory. It is also None if the number of tokens, the model's shape or its token limit is unknown.

    Args:
        config: the config of the rollout.
        context: the plugin's context; its `cache_tokens` is the number of tokens that a replica holds at once.
        available: the memory of an accelerator in bytes.
    """
    model, tokens = model_of(context), context.cache_tokens
    if tokens is None:
        return None
    try:
        shape, text = read_shape(model), read_config(model).get_text_config()
    except ModelError:
        return None  # vLLM may know it
    # vLLM refuses a KV cache into which the longest possible request does not fit.
    longest = config.max_model_len or max_positions(text)
    if longest is None:
        return None
    ranks = config.ranks_per_replica()
    divided = config.pipeline_parallel_size * min(config.tensor_parallel_size, shape.kv_heads or 1)
    width = 1 if config.kv_cache_dtype.startswith("fp8") else BYTES[model.dtype]
    each = -(-shape.cached_per_token // divided) * width
    needed = each * round(max(tokens, longest) * CACHE_SLACK)
    weights = -(-shape.parameters // ranks) * BYTES[model.dtype]
    share = config.gpu_memory_utilization * available
    return needed if weights + needed < share * (1 - WORKING_SHARE) else None


def accelerator_bytes() -> int:
    """Return the total memory of an accelerator in bytes, without allocating any of it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def _refuse_impossible(config: VllmRolloutConfig, context: PluginContext) -> None:
    """Refuse settings that vLLM accepts, but with which updates or adapters would not work.

    Raises:
        ConfigError: there is such a setting.
    """
    engines = config.engine_args.get("data_parallel_size", 1)
    if engines != 1:
        raise ConfigError(
            f"rollout.engine_args.data_parallel_size={engines!r} is not supported: a weight update would not reach all engines of a replica",
            hint=f"leave it out, and set rollout.replicas={engines}: each replica is one data-parallel engine",
        )
    dtype = context.model.dtype if context.model is not None else ""
    if (
        config.max_adapter_rank is not None
        and dtype == "float32"
        and torch.accelerator.is_available()
    ):
        raise ConfigError(
            "rollout.max_adapter_rank is set and model.dtype is 'float32', which vLLM's adapter kernels do not "
            "support on accelerators",
            hint="set model.dtype=bfloat16, or leave rollout.max_adapter_rank out and send merged weights (actor.engine.lora.sync: merged)",
        )


def may_start_empty(config: VllmRolloutConfig, context: PluginContext) -> bool:
    """Return whether the engine may start with random weights; False with adapters or quantisation, which need the weights on disk."""
    return starts_empty(config, context, kept=config.max_adapter_rank or config.quantization)


def make_engine_args(arguments: Mapping[str, Any]) -> Any:
    """Construct vLLM's `AsyncEngineArgs` from arguments by name.

    Raises:
        ConfigError: vLLM does not have one of the arguments.
    """
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in arguments:
        if name not in known:
            raise unknown_argument(name, known, engine="vLLM")
    return AsyncEngineArgs(**arguments)
