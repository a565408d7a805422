"""The environment in which SGLang's servers start."""

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
    """Return the environment variables of a server, besides this process's own."""
    devices = visible_devices(config.ranks_per_replica(), context, "CUDA_VISIBLE_DEVICES")
    return {TOKEN_VARIABLE: token, **devices, **joining(context), **sleeping(config)}


def joining(context: PluginContext) -> dict[str, str]:
    """Return the environment variables with which a server's processes can join an NCCL group with the trainer's.

    SGLang turns off NCCL's sharing of memory through the driver where the variable is absent. A process without it can't open
    what one with it shares on the same machine: the group fails.

    Args:
        context: the context of the rollout.

    Returns:
        NCCL's own choice, which the trainer has too; empty where the variable is set, or weights come in another way.
    """
    if _NCCL_MEMORY in os.environ or getattr(context.transport, "name", None) != "nccl":
        return {}
    return {_NCCL_MEMORY: "-2"}


def sleeping(config: SglangRolloutConfig) -> dict[str, str]:
    """Return the environment variables with which a server can sleep although the trainer configures torch's allocator with expandable
    segments.

    SGLang's memory saver takes hold of `cudaMalloc`, which those pass by: it refuses to start under the one name of the
    setting, and under the other it would free nothing.

    Args:
        config: the config of the rollout.

    Returns:
        The allocator's settings without that one, by variable; empty where they do not have it, or the rollout never sleeps.
    """
    if not config.offload:
        return {}
    found = {name: os.environ.get(name, "") for name in _ALLOCATOR}
    return {
        name: _EXPANDABLE.sub("", value).strip(", ")
        for name, value in found.items()
        if _EXPANDABLE.search(value)
    }
