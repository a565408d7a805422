"""Why TensorRT-LLM did not start, or died, in words: from what it raised and printed to one error of Dovetail's."""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.errors import ConfigError, DovetailError, ModelError, PlacementError, nearest
from dovetail.serving import Failures, Words
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig

_MARKS = re.compile(
    r"^\x1b\[\d+m|^\([^)]*pid=\d+[^)]*\)\s?|^\[[\d/:\- ]+\]\s?|^\[TRT-LLM\]\s?|^\[[TDIWEF]\]\s?"
    r"|^(?:ERROR|INFO|WARNING) [\d-]+ [\d:.,]+ \[[^\]]+\]\s?"
)


def _no_argument(found: re.Match[str], config: TrtllmRolloutConfig) -> DovetailError:
    name = found[1]
    close = nearest(
        name, ("max_batch_size", "max_num_tokens", "kv_cache_config", "scheduler_config")
    )
    hint = f"did you mean {close!r}?" if close else "see the arguments of LLM in its documentation"
    whose = "rollout.engine_args: " if name in config.engine_args else ""
    return ConfigError(f"{whose}TensorRT-LLM has no engine argument {name!r}", hint=hint)


def _no_memory(_: re.Match[str], config: TrtllmRolloutConfig) -> DovetailError:
    return PlacementError(
        "TensorRT-LLM ran out of the accelerator's memory while it started: weights, CUDA graphs and "
        f"rollout.kv_cache_memory={config.kv_cache_memory:g} of what is left do not fit beside what is there",
        hint="lower rollout.kv_cache_memory, take the trainer off the accelerator while the rollout generates "
        "(actor.offload=true, rollout.offload=true), or divide the model over more accelerators "
        "(rollout.tensor_parallel_size)",
    )


def _unsupported(found: re.Match[str], _: TrtllmRolloutConfig) -> DovetailError:
    return ModelError(
        f"TensorRT-LLM does not support this model: its architecture is {found[1]}",
        hint="use rollout.name=hf, which runs what transformers runs, or a newer TensorRT-LLM",
    )


def _no_accelerators(_: re.Match[str], config: TrtllmRolloutConfig) -> DovetailError:
    return PlacementError(
        f"TensorRT-LLM finds fewer accelerators than rollout.tensor_parallel_size={config.tensor_parallel_size}",
        hint="it runs on NVIDIA's alone; give the rollout's pool as many as a replica divides its model over",
    )


_KNOWN: tuple[tuple[re.Pattern[str], Words], ...] = (
    (re.compile(r"LLM got invalid argument: '?(\w+)'?"), _no_argument),
    (re.compile(r"unexpected keyword argument '(\w+)'"), _no_argument),
    (re.compile(r"Unknown architecture for AutoModelForCausalLM: (\w+)"), _unsupported),
    (
        re.compile(r"OutOfMemoryError|CUDA out of memory|insufficient memory for KV cache"),
        _no_memory,
    ),
    (
        re.compile(r"No (?:CUDA|NVIDIA) (?:GPUs|devices) (?:are|were) (?:available|found)"),
        _no_accelerators,
    ),
)

FAILURES = Failures("TensorRT-LLM", _MARKS, _KNOWN)
"""TensorRT-LLM's ways to fail."""


def start_failure(
    error: BaseException, log: Path | None, config: TrtllmRolloutConfig
) -> DovetailError:
    """The error for an engine that did not start, as `Failures.start`."""
    return FAILURES.start(error, log, config)
