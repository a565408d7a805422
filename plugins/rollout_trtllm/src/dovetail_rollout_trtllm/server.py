"""The command that starts `trtllm-serve`, its options, and its output after a failure."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from dovetail.errors import PluginNeedsError
from dovetail.interfaces import PluginContext
from dovetail_datasets import ModelFacts, overrides_for_engine
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_serving import LOOPBACK, Failures, merged_arguments, model_of, refuse_indivisible

ENGINE = "TensorRT-LLM"
"""The engine's name in error messages."""
INSTALL = "pip install tensorrt-llm --extra-index-url https://pypi.nvidia.com"
"""The command that installs TensorRT-LLM from NVIDIA's index, to run in the environment of `rollout.executable`."""


def program_of(executable: str) -> str | None:
    """Return the path of a program; None if it does not exist.

    Args:
        executable: a path, or a name in this interpreter's directory or on the PATH.
    """
    beside = Path(sys.executable).parent / executable
    return str(beside) if beside.is_file() else shutil.which(executable)


def server_command(
    config: TrtllmRolloutConfig, context: PluginContext, options: Path
) -> tuple[str, list[str]]:
    """Write a server's options file, and return the server's program and its arguments except model and port.

    Args:
        config: the rollout's config.
        context: the rollout's context.
        options: the path of the options file to write.

    Raises:
        PluginNeedsError: the program is not installed.
        ModelError: no model is configured, or its directory does not exist.
        ConfigError: the replica's ranks can't divide the model.
    """
    program = program_of(config.executable)
    if program is None:
        raise PluginNeedsError(
            f"rollout 'trtllm' needs the program {config.executable!r}, which was not found",
            hint=f"set rollout.executable to its path, or install it: {INSTALL}",
        )
    # trtllm-serve reads YAML, of which JSON is a subset.
    options.write_text(json.dumps(engine_options(config, context), indent=2))
    model = model_of(context)
    tokenizer = ["--tokenizer", model.tokenizer_path or model.path]
    return program, ["--host", LOOPBACK, *tokenizer, "--extra_llm_api_options", str(options)]


def engine_options(config: TrtllmRolloutConfig, context: PluginContext) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's `LLM` as JSON values: the user's `engine_args`, overridden by Dovetail's arguments.

    Raises:
        ModelError: no model is configured, or its directory does not exist.
        ConfigError: the replica's ranks can't divide the model.
    """
    model = model_of(context)
    spread = config.expert_parallel_size or 1
    refuse_indivisible(model, ranks=config.attention_ranks(), spread=spread)
    longest = ModelFacts.read(model, context.tokenizer, config.max_model_len).max_positions
    known: dict[str, Any] = {
        "dtype": model.dtype,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "model_kwargs": overrides_for_engine(model) or None,
        "tensor_parallel_size": config.tensor_parallel_size,
        "moe_expert_parallel_size": config.expert_parallel_size,
        "max_seq_len": longest,
        # A separate limit, with a default of 1,024.
        "max_input_len": longest,
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": config.max_num_tokens,
        "kv_cache_config": {
            "enable_block_reuse": config.prefix_caching,
            "free_gpu_memory_fraction": config.kv_cache_memory,
            "dtype": config.kv_cache_dtype,
        },
    }
    own = {name: value for name, value in known.items() if value is not None}
    if config.enforce_eager:
        own["cuda_graph_config"] = None
    return merged_arguments(config.engine_args, own, context)


FAILURES = Failures(ENGINE, re.compile(r"^\[([\d/:\- ]+|TRT-LLM|[TDIWEF])\] "))
"""Description of the engine's failures: output is shown without timestamps and levels, and no cause is recognised yet."""
