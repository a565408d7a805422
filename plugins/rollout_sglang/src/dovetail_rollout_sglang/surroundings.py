"""The environment in which SGLang's servers start: their variables, and where they print."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_sglang.config import SglangRolloutConfig

TOKEN_VARIABLE = "DOVETAIL_SGLANG_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a server: who does not send its value as a bearer token is refused."""


def log_path(context: PluginContext) -> Path:
    """The file that a replica's SGLang prints to: below the run's directory, or a temporary one outside a run."""
    name = f"rollout-{context.rank}.sglang.log"
    if context.run_directory is None:
        return Path(tempfile.mkdtemp(prefix="dovetail-sglang-")) / name
    directory = Path(context.run_directory) / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def variables(config: SglangRolloutConfig, context: PluginContext, token: str) -> dict[str, str]:
    """What a server must find in its environment, beside what this process has in its own."""
    found = {TOKEN_VARIABLE: token}
    first = torch.device(context.device).index or 0
    if torch.accelerator.is_available() and first:
        # SGLang counts its accelerators from those that it sees.
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        count = config.ranks_per_replica()
        devices = visible[first:] if len(visible) > first else map(str, range(first, first + count))
        found["CUDA_VISIBLE_DEVICES"] = ",".join(list(devices)[:count])
    return found
