"""The environment in which SGLang's servers start."""

from __future__ import annotations

import os

from dovetail.interfaces.plugin import PluginContext
from dovetail.serving.surroundings import visible_devices
from dovetail_rollout_sglang.config import SglangRolloutConfig

TOKEN_VARIABLE = "DOVETAIL_SGLANG_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a server: who does not send its value as a bearer token is refused."""

_NCCL_MEMORY = "NCCL_CUMEM_ENABLE"


def variables(config: SglangRolloutConfig, context: PluginContext, token: str) -> dict[str, str]:
    """What a server must find in its environment, beside what this process has in its own."""
    devices = visible_devices(config.ranks_per_replica(), context, "CUDA_VISIBLE_DEVICES")
    return {TOKEN_VARIABLE: token, **devices, **joining(context)}


def joining(context: PluginContext) -> dict[str, str]:
    """What lets a server's processes be of one NCCL group with the trainer's.

    SGLang turns off NCCL's sharing of memory through the driver where the variable is absent. A process without it can't open
    what one with it shares on the same machine: the group fails.

    Args:
        context: of the rollout.

    Returns:
        NCCL's own choice, which the trainer has too; empty where the variable is set, or weights come in another way.
    """
    if _NCCL_MEMORY in os.environ or getattr(context.transport, "name", None) != "nccl":
        return {}
    return {_NCCL_MEMORY: "-2"}
