"""The environment of an engine's processes: log file, visible accelerators, and free memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from dovetail.interfaces import PluginContext


def log_path(engine: str, context: PluginContext) -> Path:
    """Return the log file of a replica's engine: below the run's directory, or a temporary file outside a run.

    Args:
        engine: the plugin's name, which is part of the file's name.
        context: the context of the rollout.
    """
    name = f"rollout-{context.rank}.{engine}.log"
    if context.run_directory is None:
        return Path(tempfile.mkdtemp(prefix=f"dovetail-{engine}-")) / name
    directory = Path(context.run_directory) / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def visible_devices(count: int, context: PluginContext, variable: str) -> dict[str, str]:
    """Return the environment variable that shows an engine only the accelerators of its replica.

    Args:
        count: the number of accelerators of a replica.
        context: the rollout's context, whose device is the replica's first accelerator.
        variable: the environment variable that selects a process's visible accelerators.

    Returns:
        The variable and its value; empty if the replica's first accelerator is the first visible one, or there are no accelerators.
    """
    first = torch.device(context.device).index or 0
    if not first or not torch.accelerator.is_available():
        return {}
    visible = [one for one in os.environ.get(variable, "").split(",") if one]
    devices = visible[first:] if len(visible) > first else map(str, range(first, first + count))
    return {variable: ",".join(list(devices)[:count])}


def free_bytes(device: torch.device) -> int:
    """Return the free memory of an accelerator in bytes, from the driver, after all queued work; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.accelerator.synchronize(device)
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)
