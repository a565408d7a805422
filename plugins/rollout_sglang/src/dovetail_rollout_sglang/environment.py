"""Environment variables of SGLang's servers."""

from __future__ import annotations

import os
import re

from dovetail.interfaces import PluginContext
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_serving import visible_devices

TOKEN_VARIABLE = "DOVETAIL_SGLANG_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a server with the bearer token that requests must carry."""

_NCCL_MEMORY = "NCCL_CUMEM_ENABLE"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:[^,]*,?")


def variables(config: SglangRolloutConfig, context: PluginContext, token: str) -> dict[str, str]:
    """Return the environment variables to add for a server's processes: token, visible devices, and settings of NCCL and the allocator."""
    devices = visible_devices(config.ranks_per_replica(), context, "CUDA_VISIBLE_DEVICES")
    return {TOKEN_VARIABLE: token, **devices, **joining(context), **sleeping(config)}


def joining(context: PluginContext) -> dict[str, str]:
    """Return the environment variables that let a server's processes join an NCCL group with the trainer.

    If NCCL_CUMEM_ENABLE is unset, SGLang turns off NCCL's cuMem allocations, which the trainer uses. Processes of one machine can't
    share memory if only some use cuMem, and the group fails.

    Args:
        context: the context of the rollout.

    Returns:
        NCCL_CUMEM_ENABLE with NCCL's default; empty if the variable is set, or if weights are not sent over NCCL.
    """
    if _NCCL_MEMORY in os.environ or getattr(context.transport, "name", None) != "nccl":
        return {}
    return {_NCCL_MEMORY: "-2"}


def sleeping(config: SglangRolloutConfig) -> dict[str, str]:
    """Return torch's allocator settings without expandable segments, so that a server can sleep.

    SGLang's memory saver hooks `cudaMalloc`, which expandable segments do not use. If PYTORCH_CUDA_ALLOC_CONF sets them, the saver
    refuses to start; if PYTORCH_ALLOC_CONF sets them, it would free no memory.

    Args:
        config: the config of the rollout.

    Returns:
        The changed settings by environment variable; empty if no variable sets expandable segments, or if the rollout never sleeps.
    """
    if not config.offload:
        return {}
    found = {name: os.environ.get(name, "") for name in _ALLOCATOR}
    return {
        name: _EXPANDABLE.sub("", value).strip(", ")
        for name, value in found.items()
        if _EXPANDABLE.search(value)
    }
