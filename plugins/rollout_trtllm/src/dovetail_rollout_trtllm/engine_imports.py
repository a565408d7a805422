"""All that is imported from TensorRT-LLM, and from Ray for it: by name, at the last moment, here and nowhere else."""

from __future__ import annotations

import importlib
import ipaddress
import os
from collections.abc import Mapping
from typing import Any

from dovetail.errors import RolloutError
from dovetail_rollout_trtllm.engine_types import Engine

WHERE = {
    "AsyncLLM": "tensorrt_llm",
    "SamplingParams": "tensorrt_llm",
    "LogprobMode": "tensorrt_llm.sampling_params",
    "KvCacheConfig": "tensorrt_llm.llmapi.llm_args",
    "CudaGraphConfig": "tensorrt_llm.llmapi.llm_args",
    "DecodeCudaGraphConfig": "tensorrt_llm.llmapi.llm_args",
    "SleepConfig": "tensorrt_llm.llmapi.llm_args",
    "ExecutorMemoryType": "tensorrt_llm.llmapi.llm_args",
    "WorkerExtension": "tensorrt_llm.llmapi.rlhf_utils",
    "OpenAIServer": "tensorrt_llm.serve",
}
"""The module of each name."""
FALLBACKS = {"CudaGraphConfig": "DecodeCudaGraphConfig"}
"""What a name is called where it is missing: later releases have several kinds of graphs."""
NESTED = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "sleep_config": "SleepConfig",
}
"""Arguments of the engine that are objects of its own, made from a mapping."""


def imported(name: str) -> Any:
    """The object of this name.

    Raises:
        ImportError: this TensorRT-LLM has it neither under its name nor under its later one.
    """
    module = importlib.import_module(WHERE[name])
    found = getattr(module, name, None)
    if found is not None:
        return found
    if name in FALLBACKS:
        return imported(FALLBACKS[name])
    raise ImportError(f"{WHERE[name]} has no {name}")


def make_engine(arguments: Mapping[str, Any]) -> Engine:
    """An engine that is not set up yet.

    Args:
        arguments: of `engine_args.engine_arguments`.
    """
    made = dict(arguments)
    for name, kind in NESTED.items():
        if isinstance(made.get(name), Mapping):
            made[name] = imported(kind)(**made[name])
    engine: Engine = imported("AsyncLLM")(**made)
    return engine


def memory_tags(tags: frozenset[str]) -> list[str]:
    """TensorRT-LLM's kinds of memory behind Dovetail's tags `weights` and `kv_cache`.

    All that an engine holds beside its KV cache counts as weights: it was measured with them, and is needed with them. Kinds
    that begin with an underscore are of its start and can't be freed.
    """
    kinds = [str(kind.value) for kind in imported("ExecutorMemoryType")]
    usable = [kind for kind in kinds if not kind.startswith("_")]
    found = [kind for kind in usable if kind != "kv_cache"] if "weights" in tags else []
    return [*found, "kv_cache"] if "kv_cache" in tags else found


def openai_app(engine: Engine, model: str) -> Any:
    """TensorRT-LLM's own application: its OpenAI paths over this engine."""
    server = imported("OpenAIServer")(
        engine, model=model, tool_parser=None, server_role=None, metadata_server_cfg=None
    )
    return server.app


def finalizer() -> Any:
    """The engine's own way to finish an update, which leaves CUDA graphs valid; None where this release has none."""
    return getattr(imported("WorkerExtension"), "finalize_weight_update", None)


def start_ray(accelerators: int) -> None:
    """Start a Ray of this process's own on the loopback interface, of which TensorRT-LLM takes its workers.

    It would otherwise join the cluster that the run itself is on, and ask that for accelerators which are the replica's
    already.

    Raises:
        RolloutError: it listens where other machines reach it.
    """
    # Else Ray, on Linux, puts an address that other machines reach in the place of 127.0.0.1. Read when it is imported.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = importlib.import_module("ray")
    ray.init(
        address="local",
        num_gpus=accelerators,
        namespace="trtllm",
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
    )
    addresses = [str(node["NodeManagerAddress"]) for node in ray.nodes()]
    if outer := [one for one in addresses if not ipaddress.ip_address(one).is_loopback]:
        raise RolloutError(
            f"the Ray of TensorRT-LLM's workers listens at {outer[0]}, where other machines reach it, and not on loopback",
            hint="this release of Ray does not heed RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0: use Ray 2.60",
        )
