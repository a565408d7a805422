"""TensorRT-LLM's engine arguments, from a replica's config and context; every value is JSON."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import PluginContext
from dovetail.serving import ModelFacts, has_tokenizer, merged_arguments, model_of, starts_empty
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.layout import refuse_impossible

WORKER = "dovetail_rollout_trtllm.worker.DovetailWorker"
"""What is added to the engine's class of workers."""


def engine_arguments(config: TrtllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """What TensorRT-LLM's `AsyncLLM` is made of: the user's `engine_args`, and ours over them.

    One warning names every argument of which both had something to say, with both values.

    Raises:
        ModelError: there is no model, or no directory where the config says.
        ConfigError: a layout that can't be had.
    """
    refuse_impossible(config, model_of(context))
    return merged_arguments(config.engine_args, own_arguments(config, context), context)


def own_arguments(config: TrtllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """The arguments that Dovetail sets itself."""
    model = model_of(context)
    longest = ModelFacts.read(model, context.tokenizer, config.max_model_len).max_positions
    found: dict[str, Any] = {
        "model": model.path,
        "backend": "pytorch",
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": not has_tokenizer(model),
        "tensor_parallel_size": config.tensor_parallel_size,
        "ray_worker_extension_cls": WORKER,
        # The only sampler with log-probabilities as drawn: after temperature, top-k and top-p.
        "sampler_type": "TorchSampler",
        "kv_cache_config": {
            "enable_block_reuse": config.prefix_caching,
            "free_gpu_memory_fraction": config.kv_cache_memory,
            "dtype": config.kv_cache_dtype,
        },
    }
    optional = {
        "tokenizer": model.tokenizer_path,
        "revision": model.revision,
        "max_seq_len": longest,
        # A limit of its own, which is 1,024 otherwise.
        "max_input_len": longest,
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": config.max_num_tokens,
        "moe_expert_parallel_size": config.expert_parallel_size,
    }
    found |= {name: value for name, value in optional.items() if value is not None}
    if config.enforce_eager:
        found["cuda_graph_config"] = None
    elif "cuda_graph_config" not in config.engine_args:
        found["cuda_graph_config"] = {"enable_padding": True}
    if config.offload:
        # Weights are kept in the host's memory; keys and values are computed anew.
        found["sleep_config"] = {"restore_modes": {"kv_cache": "NONE"}}
    if starts_empty(config, context):
        found["load_format"] = "dummy"
    return found
