"""Causes of an SGLang server's failure to start, recognised in its output."""

from __future__ import annotations

import re

from dovetail.errors import ConfigError, ModelError, PlacementError
from dovetail_serving import Failures, Known

_MARKS = re.compile(r"^\[[\d-]+ [\d:]+(?: [A-Z]+\d+)*\]\s?")
_NO_ARGUMENT = "rollout.engine_args: SGLang has no server argument {name!r}"

FAILURES = Failures(
    "SGLang",
    _MARKS,
    (
        Known(
            r"SGLang has no server argument '(?P<name>\w+)'.{0,40}?did you mean '(?P<meant>\w+)'",
            ConfigError,
            _NO_ARGUMENT,
            "did you mean {meant!r}?",
        ),
        Known(
            r"SGLang has no server argument '(?P<name>\w+)'",
            ConfigError,
            _NO_ARGUMENT,
            "see the fields of SGLang's ServerArgs",
        ),
        Known(
            r"Not enough memory",
            PlacementError,
            "rollout.gpu_memory_utilization={config.gpu_memory_utilization:g} leaves SGLang no memory for a KV cache after "
            "the weights",
            "raise rollout.gpu_memory_utilization; divide the model over more accelerators (rollout.tensor_parallel_size); or take the trainer off the "
            "accelerator while the rollout generates (actor.offload=true, rollout.offload=true)",
        ),
        Known(
            r"OutOfMemoryError|CUDA out of memory",
            PlacementError,
            "the accelerator has too little free memory for SGLang, which takes rollout.gpu_memory_utilization="
            "{config.gpu_memory_utilization:g} of the memory that is free at its start, and further memory for CUDA graphs",
            "lower rollout.gpu_memory_utilization or rollout.max_num_seqs, or take the trainer off the accelerator while "
            "the rollout generates (actor.offload=true, rollout.offload=true)",
        ),
        Known(
            r"context_length \((?P<asked>\d+)\) is greater than the derived context_length \((?P<most>\d+)\)",
            ConfigError,
            "rollout.max_model_len={asked} is more than the model's {most} positions",
            "set rollout.max_model_len to {most} or less, or leave it out",
        ),
        Known(
            r"only \[(?P<backends>[^\]]*)\] attention backends are supported for deterministic inference, .{0,40}?specified "
            r"'(?P<chosen>\w+)'",
            ConfigError,
            "rollout.seeding=per_sample needs SGLang's deterministic inference, which attention_backend {chosen!r} does not "
            "support",
            "set rollout.engine_args.attention_backend to one of {backends}, or rollout.seeding=none",
        ),
        Known(
            r"Model architectures (?P<model>\[[^\]]*\]) are not supported",
            ModelError,
            "SGLang does not support this model: its architecture is {model}",
            "set rollout.name=hf, which runs the models that transformers supports, or install a newer SGLang",
        ),
    ),
)
