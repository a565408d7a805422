"""Causes of vLLM's failure to start or sudden end, recognised in its exceptions and output."""

from __future__ import annotations

import re

from dovetail.errors import ConfigError, ModelError, PlacementError
from dovetail_serving import Failures, Known

_MARKS = re.compile(r"^\(\w+ pid=\d+\)\s?|^(?:ERROR|INFO|WARNING) [\d-]+ [\d:.,]+ \[[^\]]+\]\s?")

FAILURES = Failures(
    "vLLM",
    _MARKS,
    (
        Known(
            r"Free memory on device (?P<device>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than "
            r"desired GPU memory utilization \((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)",
            PlacementError,
            "vLLM can't take its share of {device}: rollout.gpu_memory_utilization={share} asks for {asked} of {total} "
            "GiB, but only {free} GiB are free",
            "lower rollout.gpu_memory_utilization, or take the trainer off the accelerator while the rollout generates "
            "(actor.offload=true, rollout.offload=true)",
        ),
        Known(
            r"max seq len \((?P<length>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the "
            r"available KV cache memory \((?P<free>[\d.]+) GiB\)",
            PlacementError,
            "the KV cache of vLLM is too small for one sequence of {length} tokens: {needed} GiB are needed, but "
            "rollout.gpu_memory_utilization={config.gpu_memory_utilization:g} leaves {free} GiB after the weights",
            "lower rollout.max_model_len to the longest prompt and response together, or raise "
            "rollout.gpu_memory_utilization (on a CPU the environment variable VLLM_CPU_KVCACHE_SPACE, in GiB)",
        ),
        Known(
            r"No available memory for the cache blocks",
            PlacementError,
            "rollout.gpu_memory_utilization={config.gpu_memory_utilization:g} leaves vLLM no memory for a KV cache: 0 GiB "
            "are left after the weights",
            "raise rollout.gpu_memory_utilization, or divide the model over more accelerators (rollout.tensor_parallel_size)",
        ),
        Known(
            r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired "
            r"CPU memory utilization \((?P<share>[\d.]+), (?P<asked>[\d.]+) GiB\)",
            PlacementError,
            "vLLM can't take its share of the host's memory: rollout.gpu_memory_utilization={share} asks for {asked} of "
            "{total} GiB, but only {free} GiB are free",
            "lower rollout.gpu_memory_utilization (on a CPU the share of the host's memory), or free memory",
        ),
        Known(
            r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation is less "
            r"than requested memory for kv \((?P<asked>[\d.]+) GiB\)",
            PlacementError,
            "vLLM can't allocate its KV cache: it asks for {asked} of the host's {total} GiB, but only {free} GiB are free",
            "lower the environment variable VLLM_CPU_KVCACHE_SPACE (GiB), or free memory",
        ),
        Known(
            r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
            r"\(\w*=?(?P<most>\d+)",
            ConfigError,
            "rollout.max_model_len={asked} is more than the model's {most} positions",
            "set rollout.max_model_len to {most} or less, or leave it out",
        ),
        Known(
            r"Model architectures (?P<model>\[[^\]]*\]) are not supported",
            ModelError,
            "vLLM does not support this model: its architecture is {model}",
            "set rollout.name=hf, which runs the models that transformers supports, or install a newer vLLM",
        ),
        Known(
            # Unless v2 was requested, vLLM prints only a warning: "…; using the V1 model runner instead".
            r"Model Runner V2 (?P<why>requires Triton|does not yet support: [\w ,/'-]+)(?=\.| \[|$)",
            ConfigError,
            "vLLM's model runner V2 can't be used here: it {why}",
            "leave rollout.model_runner out or set it to v1, and unset the environment variable VLLM_USE_V2_MODEL_RUNNER",
        ),
    ),
)
