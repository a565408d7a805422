"""SGLang's server arguments, from a replica's config and context, and the command that starts a server with them."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces.plugin import PluginContext
from dovetail.serving.facts import refuse_missing
from dovetail_rollout_sglang.config import SglangRolloutConfig

MODULE = "dovetail_rollout_sglang.serve"
"""What `python -m` is given; its one argument is a JSON object of SGLang's `ServerArgs`."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def server_arguments(config: SglangRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """What SGLang's `ServerArgs` are made of, but for the address: the user's `engine_args`, and ours over them.

    One warning names every argument of which both had something to say, with both values.

    Raises:
        ModelError: there is no model, or no directory where the config says.
        ConfigError: an argument asks for what this plugin can't drive.
    """
    ours = own_arguments(config, context)
    theirs = dict(config.engine_args)
    if theirs.get("dp_size", 1) != 1 and not theirs.get("enable_dp_attention"):
        raise ConfigError(
            f"rollout.engine_args.dp_size={theirs['dp_size']} starts several copies of the model behind one server, which take "
            "no updates of weights",
            hint="set rollout.replicas for several copies, or enable_dp_attention=true beside it",
        )
    if theirs.get("pp_size", 1) != 1:
        raise ConfigError(
            f"rollout.engine_args.pp_size={theirs['pp_size']}: updates of weights do not reach the stages of a pipeline",
            hint="divide the model with rollout.tensor_parallel_size",
        )
    clashes = [
        f"{name}={theirs[name]!r} (Dovetail sets {ours[name]!r})"
        for name in sorted(ours.keys() & theirs.keys())
        if theirs[name] != ours[name]
    ]
    if clashes:
        context.logger.warning(
            "rollout.engine_args: Dovetail's own values hold instead of %s", "; ".join(clashes)
        )
    return {**theirs, **ours}


def own_arguments(config: SglangRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """The arguments that Dovetail sets itself; a JSON value each."""
    model = context.model
    if model is None:
        raise ModelError("the rollout was given no model", hint="set model.path in the config")
    refuse_missing(model.path)
    found: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "random_seed": replica_seed(context.seed, context.rank),
        "tp_size": config.tensor_parallel_size,
        "ep_size": config.expert_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_radix_cache": not config.prefix_caching,
        "kv_cache_dtype": config.kv_cache_dtype,
        # Sampling is stated in every request; a model's generation_config.json must not add to it.
        "sampling_defaults": "openai",
        # Requests are handed over within the process that knows them all.
        "tokenizer_worker_num": 1,
    }
    optional: dict[str, Any] = {
        "tokenizer_path": model.tokenizer_path,
        "revision": model.revision,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "quantization": config.quantization,
        "disable_cuda_graph": True if config.enforce_eager else None,
        "enable_deterministic_inference": True if config.seeding == "per_sample" else None,
        "skip_tokenizer_init": (
            None if _has_tokenizer(model.tokenizer_path or model.path) else True
        ),
        "device": None if torch.accelerator.is_available() else "cpu",
        "load_format": "dummy" if starts_empty(config, context) else None,
    }
    found |= {name: value for name, value in optional.items() if value is not None}
    if config.offload and torch.accelerator.is_available():
        found["enable_memory_saver"] = True
        # Where a whole update comes before anything is generated, there is nothing to keep.
        found["enable_weights_cpu_backup"] = not context.weights_follow
    return found


def starts_empty(config: SglangRolloutConfig, context: PluginContext) -> bool:
    """Whether SGLang starts on random weights, since a whole update comes before the first request.

    That is sooner there; and a tensor that no update brings stays random, so that the probe finds it.
    """
    chosen = "load_format" in config.engine_args
    return context.weights_follow and not (chosen or config.quantization or config.urls)


def server_command(
    config: SglangRolloutConfig, context: PluginContext, *, host: str, port: int
) -> list[str]:
    """Program and arguments of a replica's own server.

    Raises:
        ModelError: there is no model, or no directory where the config says.
        ConfigError: an argument asks for what this plugin can't drive.
    """
    arguments = {**server_arguments(config, context), "host": host, "port": port}
    return [sys.executable, "-m", MODULE, json.dumps(arguments)]


def command_by_hand(config: SglangRolloutConfig, context: PluginContext, *, port: int) -> str:
    """A line for a shell that starts a server which this rollout can join."""
    address = {"host": "127.0.0.1", "port": port}
    arguments = {**config.engine_args, **own_arguments(config, context), **address}
    return shlex.join(["python", "-m", MODULE, json.dumps(arguments)])


def replica_seed(seed: int, rank: int) -> int:
    """The seed of one replica's own generator, 31 bits: replicas must not draw alike."""
    digest = hashlib.blake2b(f"{seed}/sglang/{rank}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def _has_tokenizer(path: str) -> bool:
    """Whether SGLang will find a tokenizer; it needs one for stop strings only. Hub ids are taken at their word."""
    directory = Path(path)
    return not directory.is_dir() or any((directory / name).is_file() for name in _TOKENIZER_FILES)
