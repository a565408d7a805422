"""The environment in which a server starts."""

from __future__ import annotations

from dovetail.interfaces import PluginContext
from dovetail.serving import visible_devices
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig

TOKEN_VARIABLE = "DOVETAIL_TRTLLM_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a server: who does not send its value as a bearer token is refused."""


def variables(config: TrtllmRolloutConfig, context: PluginContext, token: str) -> dict[str, str]:
    """What a server must find in its environment, beside what this process has in its own."""
    devices = visible_devices(config.ranks_per_replica(), context, "CUDA_VISIBLE_DEVICES")
    return {TOKEN_VARIABLE: token, **devices}
