"""The random state of one rank of an engine: in use while the model runs, and saved in checkpoints as raw bytes in safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dovetail.errors import CheckpointError


def random_file(rank: int) -> str:
    """Return the name of the checkpoint's file with a rank's random state."""
    return f"random-{rank:05}.safetensors"


class RandomState:
    """The state of torch's generators for one engine, independent of other users of the generators in the process.

    Attributes:
        tensors: the states of torch's generators, uint8 each: for the CPU, and for the device unless it is the CPU.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self.tensors = {"cpu": torch.Generator().manual_seed(seed).get_state()}
        if device.type != "cpu":
            self.tensors["device"] = torch.Generator(device).manual_seed(seed).get_state()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Set torch's generators to this state within the block; then save their new state and restore the earlier one."""
        before = self._current()
        self._set(self.tensors)
        try:
            yield
        finally:
            self.tensors = self._current()
            self._set(before)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the generators' states, uint8 [n] by name, from a checkpoint; generators that it lacks keep their state."""
        self.tensors |= {name: tensors[name] for name in self.tensors.keys() & tensors.keys()}

    def _current(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            states["device"] = module.get_rng_state(self._device)
        return states

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(tensors["cpu"])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(tensors["device"], self._device)


def stored_random_state(directory: Path, rank: int) -> dict[str, Tensor]:
    """Return a rank's generator states from a checkpoint, uint8 [n] by name; empty if the checkpoint has no such rank.

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
