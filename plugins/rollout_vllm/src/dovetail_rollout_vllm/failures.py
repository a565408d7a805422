"""Why vLLM did not start, or died, in words: from what it raised and printed to one error of Dovetail's."""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.errors import ConfigError, DovetailError, ModelError, PlacementError, RolloutError
from dovetail.serving import Failures, Words
from dovetail_rollout_vllm.config import VllmRolloutConfig

_MARKS = re.compile(r"^\(\w+ pid=\d+\)\s?|^(?:ERROR|INFO|WARNING) [\d-]+ [\d:.,]+ \[[^\]]+\]\s?")


def start_failure(
    error: BaseException, log: Path | None, config: VllmRolloutConfig
) -> DovetailError:
    """The error for an engine that did not start, as `Failures.start`."""
    return FAILURES.start(error, log, config)


def death(error: BaseException | str, log: Path | None) -> RolloutError:
    """The error for an engine that ran and is dead, as `Failures.death`."""
    return FAILURES.death(error, log)


def _too_little_free(found: re.Match[str], _: VllmRolloutConfig) -> DovetailError:
    device, free, total, share, asked = found.groups()
    return PlacementError(
        f"vLLM can't take its share of {device}: rollout.gpu_memory_utilization={share} asks for {asked} of {total} "
        f"GiB, and {free} GiB are free",
        hint="lower rollout.gpu_memory_utilization, or take the trainer off the accelerator while the rollout "
        "generates (actor.offload=true, rollout.offload=true)",
    )


def _cache_too_small(found: re.Match[str], config: VllmRolloutConfig) -> DovetailError:
    length, needed, free = found.groups()
    return PlacementError(
        f"the KV cache of vLLM is too small for one sequence of {length} tokens: {needed} GiB are needed, and "
        f"rollout.gpu_memory_utilization={config.gpu_memory_utilization:g} leaves {free} GiB after the weights",
        hint="lower rollout.max_model_len to the longest prompt and response together, or raise "
        "rollout.gpu_memory_utilization (on a CPU the environment variable VLLM_CPU_KVCACHE_SPACE, in GiB)",
    )


def _no_cache(_: re.Match[str], config: VllmRolloutConfig) -> DovetailError:
    return PlacementError(
        f"rollout.gpu_memory_utilization={config.gpu_memory_utilization:g} leaves vLLM no memory for a KV cache: "
        "0 GiB are left after the weights",
        hint="raise it, or divide the model over more accelerators (rollout.tensor_parallel_size)",
    )


def _cpu_memory(found: re.Match[str], _: VllmRolloutConfig) -> DovetailError:
    free, total, share, asked = found.groups()
    return PlacementError(
        f"vLLM can't take its share of the host's memory: rollout.gpu_memory_utilization={share} asks for {asked} of "
        f"{total} GiB, and {free} GiB are free",
        hint="lower rollout.gpu_memory_utilization (on a CPU the share of the host's memory), or free memory",
    )


def _cpu_cache(found: re.Match[str], _: VllmRolloutConfig) -> DovetailError:
    free, total, asked = found.groups()
    return PlacementError(
        f"vLLM can't get the KV cache that it asks for: {asked} of the host's {total} GiB, and {free} GiB are free",
        hint="lower the environment variable VLLM_CPU_KVCACHE_SPACE (GiB), or free memory",
    )


def _too_long(found: re.Match[str], _: VllmRolloutConfig) -> DovetailError:
    return ConfigError(
        f"rollout.max_model_len={found[1]} is more than the model's {found[2]} positions",
        hint=f"set rollout.max_model_len to {found[2]} or less, or leave it out",
    )


def _unsupported(found: re.Match[str], _: VllmRolloutConfig) -> DovetailError:
    return ModelError(
        f"vLLM does not support this model: its architecture is {found[1]}",
        hint="use rollout.name=hf, which runs what transformers runs, or a newer vLLM",
    )


_KNOWN: tuple[tuple[re.Pattern[str], Words], ...] = (
    (
        re.compile(
            r"Free memory on device (\S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory "
            r"utilization \(([\d.]+), ([\d.]+) GiB\)"
        ),
        _too_little_free,
    ),
    (
        re.compile(
            r"max seq len \((\d+)\), \(?([\d.]+) GiB KV cache is needed, which is larger than the available KV cache "
            r"memory \(([\d.]+) GiB\)"
        ),
        _cache_too_small,
    ),
    (re.compile(r"No available memory for the cache blocks"), _no_cache),
    (
        re.compile(
            r"Available memory on node \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired CPU memory "
            r"utilization \(([\d.]+), ([\d.]+) GiB\)"
        ),
        _cpu_memory,
    ),
    (
        re.compile(
            r"Available memory on node \S+ \(([\d.]+)/([\d.]+) GiB\) on kv cache allocation is less than requested "
            r"memory for kv \(([\d.]+) GiB\)"
        ),
        _cpu_cache,
    ),
    (
        re.compile(
            r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w*=?(\d+)"
        ),
        _too_long,
    ),
    (re.compile(r"Model architectures (\[[^\]]*\]) are not supported"), _unsupported),
)

FAILURES = Failures("vLLM", _MARKS, _KNOWN)
"""vLLM's ways to fail."""
