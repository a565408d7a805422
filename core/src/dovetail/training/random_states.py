"""The random states of one rank, as a checkpoint keeps them: raw bytes in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dovetail.errors import CheckpointError


def random_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"random-{rank:05}.safetensors"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """uint8 tensors: of torch's generators for the CPU and, where it is another, for the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def stored_random_state(directory: Path, rank: int) -> dict[str, Tensor]:
    """This rank's, or of ranks that did not exist then none: theirs stays as it is.

    Raises:
        CheckpointError: the file can't be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = directory / random_file(rank)
    try:
        return load_file(file) if file.exists() else {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {file} can't be read: {error}") from error


def set_random_state(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Put back what `random_state` gave."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)
