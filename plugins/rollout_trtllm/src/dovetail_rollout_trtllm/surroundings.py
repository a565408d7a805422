"""The environment in which a server starts: its variables, and where it prints."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig

TOKEN_VARIABLE = "DOVETAIL_TRTLLM_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a server: who does not send its value as a bearer token is refused."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def log_path(context: PluginContext) -> Path:
    """The file that a replica's server prints to: below the run's directory, or a temporary one outside a run."""
    name = f"rollout-{context.rank}.trtllm.log"
    if context.run_directory is None:
        return Path(tempfile.mkdtemp(prefix="dovetail-trtllm-")) / name
    directory = Path(context.run_directory) / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def variables(config: TrtllmRolloutConfig, context: PluginContext, token: str) -> dict[str, str]:
    """What a server must find in its environment, beside what this process has in its own."""
    found = {TOKEN_VARIABLE: token}
    first = torch.device(context.device).index or 0
    count = config.ranks_per_replica()
    if torch.accelerator.is_available() and first:
        visible = [one for one in os.environ.get(_VISIBLE, "").split(",") if one]
        devices = visible[first:] if len(visible) > first else map(str, range(first, first + count))
        found[_VISIBLE] = ",".join(list(devices)[:count])
    return found
