"""TensorRT-LLM's engine arguments, from a replica's config and context; every value is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.interfaces.plugin import PluginContext
from dovetail.serving.facts import ModelFacts, refuse_missing
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig

WORKER = "dovetail_rollout_trtllm.worker.DovetailWorker"
"""What is added to the engine's class of workers."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def engine_arguments(config: TrtllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """What TensorRT-LLM's `AsyncLLM` is made of: the user's `engine_args`, and ours over them.

    One warning names every argument of which both had something to say, with both values. An argument that is a mapping on
    both sides is merged.

    Raises:
        ModelError: there is no model, or no directory where the config says.
    """
    ours = own_arguments(config, context)
    theirs = dict(config.engine_args)
    clashes = []
    for name in sorted(ours.keys() & theirs.keys()):
        if isinstance(ours[name], Mapping) and isinstance(theirs[name], Mapping):
            inner = [
                f"{name}.{key}"
                for key in ours[name]
                if theirs[name].get(key, ours[name][key]) != ours[name][key]
            ]
            clashes += inner
            ours[name] = {**theirs[name], **ours[name]}
        elif theirs[name] != ours[name]:
            clashes.append(f"{name}={theirs[name]!r} (Dovetail sets {ours[name]!r})")
    if clashes:
        context.logger.warning(
            "rollout.engine_args: Dovetail's own values hold instead of %s", "; ".join(clashes)
        )
    return {**theirs, **ours}


def own_arguments(config: TrtllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """The arguments that Dovetail sets itself."""
    model = context.model
    if model is None:
        raise ModelError("the rollout was given no model", hint="set model.path in the config")
    refuse_missing(model.path)
    longest = ModelFacts.read(model, context.tokenizer, config.max_model_len).max_positions
    found: dict[str, Any] = {
        "model": model.path,
        "backend": "pytorch",
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": not _has_tokenizer(model.tokenizer_path or model.path),
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


def starts_empty(config: TrtllmRolloutConfig, context: PluginContext) -> bool:
    """Whether TensorRT-LLM starts on random weights, since a whole update comes before the first request.

    That is sooner there; and a tensor that no update brings stays random, so that the probe finds it.
    """
    return context.weights_follow and "load_format" not in config.engine_args and not config.urls


def _has_tokenizer(path: str) -> bool:
    """Whether TensorRT-LLM will find a tokenizer; it needs one for stop strings only. Hub ids are taken at their word."""
    directory = Path(path)
    return not directory.is_dir() or any((directory / name).is_file() for name in _TOKENIZER_FILES)
