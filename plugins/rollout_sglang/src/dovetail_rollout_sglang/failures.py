"""SGLang's ways to fail, in words."""

from __future__ import annotations

import re

from dovetail.errors import ConfigError, DovetailError, ModelError, PlacementError
from dovetail.serving import Failures
from dovetail_rollout_sglang.config import SglangRolloutConfig

_MARKS = re.compile(r"^\[[\d-]+ [\d:]+(?: [A-Z]+\d+)*\]\s?")


def _too_little_memory(_: re.Match[str], config: SglangRolloutConfig) -> DovetailError:
    return PlacementError(
        f"rollout.gpu_memory_utilization={config.gpu_memory_utilization:g} leaves SGLang no memory for a KV cache after the "
        "weights",
        hint="raise it; divide the model over more accelerators (rollout.tensor_parallel_size); or take the trainer off the "
        "accelerator while the rollout generates (actor.offload=true, rollout.offload=true)",
    )


def _out_of_memory(_: re.Match[str], config: SglangRolloutConfig) -> DovetailError:
    return PlacementError(
        "the accelerator has too little free memory for SGLang (rollout.gpu_memory_utilization="
        f"{config.gpu_memory_utilization:g} of what is free at its start, and its CUDA graphs)",
        hint="lower rollout.gpu_memory_utilization or rollout.max_num_seqs, or take the trainer off the accelerator while "
        "the rollout generates (actor.offload=true, rollout.offload=true)",
    )


def _too_long(found: re.Match[str], _: SglangRolloutConfig) -> DovetailError:
    return ConfigError(
        f"rollout.max_model_len={found[1]} is more than the model's {found[2]} positions",
        hint=f"set rollout.max_model_len to {found[2]} or less, or leave it out",
    )


def _unsupported(found: re.Match[str], _: SglangRolloutConfig) -> DovetailError:
    return ModelError(
        f"SGLang does not support this model: its architecture is {found[1]}",
        hint="use rollout.name=hf, which runs what transformers runs, or a newer SGLang",
    )


def _not_deterministic(found: re.Match[str], _: SglangRolloutConfig) -> DovetailError:
    return ConfigError(
        f"rollout.seeding=per_sample needs SGLang's deterministic inference, which attention_backend {found[2]!r} does not have",
        hint=f"set rollout.engine_args.attention_backend to one of {found[1]}, or rollout.seeding=none",
    )


def _unknown_argument(found: re.Match[str], _: SglangRolloutConfig) -> DovetailError:
    return ConfigError(
        f"rollout.engine_args: SGLang has no server argument {found[1]!r}",
        hint=f"did you mean {found[2]!r}?" if found[2] else "see the fields of its ServerArgs",
    )


FAILURES = Failures(
    "SGLang",
    _MARKS,
    (
        (
            re.compile(r"SGLang has no server argument '(\w+)'(?:.{0,40}?did you mean '(\w+)')?"),
            _unknown_argument,
        ),
        (re.compile(r"Not enough memory"), _too_little_memory),
        (re.compile(r"OutOfMemoryError|CUDA out of memory"), _out_of_memory),
        (
            re.compile(
                r"context_length \((\d+)\) is greater than the derived context_length \((\d+)\)"
            ),
            _too_long,
        ),
        (
            re.compile(
                r"only \[([^\]]*)\] attention backends are supported for deterministic inference, .{0,40}?specified '(\w+)'"
            ),
            _not_deterministic,
        ),
        (re.compile(r"Model architectures (\[[^\]]*\]) are not supported"), _unsupported),
    ),
)
"""What a server of SGLang's fails of."""
